-- claim: a live worker takes what it can start now, each under a new attempt number.
-- ARGV   2 worker  3 most wanted  4 lease ms  5 nonce: one per try, the same again when its reply was lost
--        6 msgpack map: its room {kv, context, total_kv (-1: unknown), prefill: tokens per class (4), idle, reserve,
--          steal_ms, scan, below}: see order.lua
-- reply  {{id, attempt, gateway, trail, class, input, need, message, …}, ms until it may find more (-1: no telling),
--         passed: the most urgent class of which something waits that did not fit; 9: nothing}
--        trail: the worker whose log holds what was delivered and is not saved ('' : none)
-- Repeat: with the same nonce the same claims are told again, and none is taken.        cost O(wanted log n)
local worker, wanted, lease_ms = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
hear()
note('lease_ms', lease_ms)
call('ZADD', LEASES, now + lease_ms, worker)
timers(16)

local told = {}
local function say(id, row)
  told[#told + 1] = id
  told[#told + 1] = row.attempt
  told[#told + 1] = row.gateway
  told[#told + 1] = row.trail
  told[#told + 1] = row.class
  told[#told + 1] = row.input
  told[#told + 1] = row.need
  told[#told + 1] = id -- the message will be in its place
end

local function tell_all() -- their messages, looked up together
  local ids = {}
  for at = 8, #told, 8 do ids[#ids + 1] = told[at] end
  if #ids > 0 then
    for i, message in ipairs(call('HMGET', TASKS, unpack(ids))) do told[8 * i] = message end
  end
  return told
end

local last = call('HGET', NONCES, worker)
if last and string.match(last, '^[^|]*') == ARGV[5] then
  for id in string.gmatch(last, '|([^|]+)') do
    local row = row_of(id)
    if row and row.state == 'running' and row.worker == worker then say(id, row) end
  end
  return { tell_all(), -1, 9 }
end

local room = cmsgpack.unpack(ARGV[6])
room.worker, room.slots, room.passed, room.hint_ms = worker, wanted, 9, 1 / 0
room.too_large = {}
room.prefill = { [0] = room.prefill[1], room.prefill[2], room.prefill[3], room.prefill[4] }
room.choosy = room.scan > 1 and counter('waiting_preferred') > 0 and not crowded(worker)
if not room.choosy then room.scan = math.min(room.scan, TRIES_MAX) end

local taken, claims = { ARGV[5] }, {}
while #taken <= wanted and not stopped().paused do
  local id, row, others = next_for(room)
  if not id then break end
  -- Charged once: another run is not the tenant's doing.
  if row.attempt == 0 then serve(row.tenant, row.input / row.weight) end
  leave(id, row, others)
  take_room(row, room)
  row.state, row.worker, row.attempt = 'running', worker, row.attempt + 1
  keep(id, row)
  claims[#claims + 1] = 0
  claims[#claims + 1] = worker .. '|' .. id
  add_sum(worker, id, row, 1)
  if row.shown and row.gateway ~= '' then -- from here on the older attempt is fenced at the gateway
    local takeover = { id = id, attempt = row.attempt }
    call('PUBLISH', PREFIX .. 'gateway:' .. row.gateway, cmsgpack.pack({ v = 1, takeovers = { takeover } }))
  end
  say(id, row)
  taken[#taken + 1] = id
end
many('ZADD', CLAIMS, claims)
for id, row in pairs(room.too_large) do
  if row.state == 'waiting' then conclude(id, row, 'refused', NOTHING, 'it is too large for every worker there is') end
end
-- A full worker (`below`) has no room; one that passed something over is only busy: below 0.
call('HSET', ROOMS, worker, room.below < 9 and 0 or room.passed < 9 and 0 - room.slots or room.slots)
if #told > 0 then
  count('started', #taken - 1)
  call('HSET', NONCES, worker, table.concat(taken, '|'))
  if call('ZCARD', WAITING) > 0 then wake() end -- the next worker: one wakes the other, no herd
end
local due = call('ZRANGE', DELAYS, 0, 0, 'WITHSCORES')[2]
local hint_ms = math.min(room.hint_ms, due and math.max(0, tonumber(due) - now) or 1 / 0)
return { tell_all(), hint_ms < 1 / 0 and hint_ms or -1, room.passed }
