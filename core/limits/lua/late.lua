-- late: usage was ingested. Charge it to each lease that neither had it in its figures nor saw it generated; where one
-- saw it, what it saw is made what Postgres has.
-- KEYS   1 hold HASH   2 leases HASH   3.. money HASH per scope, those of the hold first, in its order
-- ARGV   1 number of the ingest   2 its cost   3 seconds to remember that it was charged
-- reply  1 charged somewhere | 0 nowhere                                                          cost O(scopes)
-- Repeat: safe, the hold remembers. To be called after `settle`.
local ingest, cost = tonumber(ARGV[1]), tonumber(ARGV[2])
if tonumber(call('HGET', KEYS[2], 'ingested') or 0) < ingest then call('HSET', KEYS[2], 'ingested', ARGV[1]) end
local known = call('HMGET', KEYS[1], 'plan', 'late', 'born', 'money')
if known[2] then return 0 end
local plan, charged = known[1] and cmsgpack.unpack(known[1]), 0
for i = 3, #KEYS do
  local a, units = account(KEYS[i]), 0
  local seen = plan and plan.scopes[i - 2] and plan.scopes[i - 2].lease
  if a and seen == a.lease then units = cost - tonumber(known[4])
  elseif a and ingest > a.lease then units = cost end
  if units ~= 0 then
    spend(a, units, tonumber(known[3]) or now)
    keep_account(a)
    charged = 1
  end
end
if charged == 1 then
  call('HSET', KEYS[1], 'late', 1)
  if not known[1] then call('HSET', KEYS[1], 'state', 'settled') end
  call('EXPIRE', KEYS[1], ARGV[3])
end
return charged
