-- beat: a worker is alive. Its lease is renewed, and its claims are compared by their sum.
-- ARGV   2 worker  3 lease ms  4 sum of the claims it knows of ('' : it is leaving, forget its lease)
-- reply  {1}: the sums agree | {0, id, attempt, cancelled, …}: its claims as they are          cost O(1), O(claims) on 0
-- Repeat: safe.
local worker, lease_ms = ARGV[2], tonumber(ARGV[3])
if ARGV[4] == '' then
  bury(worker, 1024)
  return { 1 }
end
call('HSET', COUNTERS, 'lease_ms', lease_ms)
call('ZADD', LEASES, now + lease_ms, worker)
timers(64)
if (call('HGET', SUMS, worker) or '0') == ARGV[4] then return { 1 } end
local reply = { 0 }
for _, id in ipairs(claims_of(worker, 4096)) do
  local row = row_of(id)
  reply[#reply + 1] = id; reply[#reply + 1] = row.attempt; reply[#reply + 1] = row.cancelled and 1 or 0
end
return reply
