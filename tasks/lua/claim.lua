-- claim: a live worker with room takes the next tasks, each under a new attempt number.
-- ARGV   2 worker  3 most wanted  4 lease ms  5 nonce: one per try, the same again when its reply was lost
-- reply  {{id, attempt, message, …}, ms until a delayed task is due (-1: none)}        cost O(wanted log n)
-- Repeat: with the same nonce the same claims are told again, and none is taken.
local worker, lease_ms = ARGV[2], tonumber(ARGV[4])
call('HSET', COUNTERS, 'lease_ms', lease_ms)
call('ZADD', LEASES, now + lease_ms, worker)
timers(16)

local told = {}
local last = call('HGET', NONCES, worker)
if last and string.match(last, '^[^|]*') == ARGV[5] then
  for id in string.gmatch(last, '|([^|]+)') do
    local row = row_of(id)
    if row and row.state == 'running' and row.worker == worker then
      told[#told + 1] = id; told[#told + 1] = row.attempt; told[#told + 1] = call('HGET', TASKS, id)
    end
  end
  return { told, -1 }
end

local taken = { ARGV[5] }
while #taken <= tonumber(ARGV[3]) do
  local id = next_id()
  if not id then break end
  local row = row_of(id)
  if row.losses == 0 then serve(row.tenant, row.input / row.weight) end -- a second run is not the tenant's doing
  leave(id, row)
  row.state, row.worker, row.attempt = 'running', worker, row.attempt + 1
  keep(id, row)
  call('ZADD', CLAIMS, 0, worker .. '|' .. id)
  add_sum(worker, id, row, 1)
  told[#told + 1] = id; told[#told + 1] = row.attempt; told[#told + 1] = call('HGET', TASKS, id)
  taken[#taken + 1] = id
end
if #told > 0 then
  call('HSET', NONCES, worker, table.concat(taken, '|'))
  if call('ZCARD', WAITING) > 0 then wake() end -- the next worker: one wakes the other, no herd
  return { told, -1 }
end
local due = call('ZRANGE', DELAYS, 0, 0, 'WITHSCORES')[2]
return { told, due and math.max(0, tonumber(due) - now) or -1 }
