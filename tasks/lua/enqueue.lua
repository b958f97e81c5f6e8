-- enqueue: accept a task, once per id.
-- KEYS   + body STRING, view STRING, then the wake ZSET of each preferred worker
-- ARGV   2 id  3 message  4 facts ('' : no usage entry)  5 body ('' : none)  6 view ('' : none)  7 their TTL ms
--        8 msgpack map: the row's {class, tenant, owner, gateway, rerunnable, input, need, most, patience_ms, steal_ms,
--          weight, preferred, background} and {delay_ms, due_ms (from now), home_ms: lease of its gateway}, the bounds
--          {waiting_max, tokens_max, tenant_waiting_max, tenant_tokens_max}, and of a request that the store forgot
--          {attempt, shown}, and {again}: it was accepted before
-- reply  {'accepted', place, whether a worker is alive} | {'known', state}
--        | {'full', 'model' or 'tenant', waiting, tokens} | {'paused'} | {'shed'}: by an operator
-- Repeat: safe, the row is the duplicate check.                                                     cost O(log n)
local id, row = ARGV[2], cmsgpack.unpack(ARGV[8])
local known = row_of(id)
if known then return { 'known', known.state } end

look_at('stops', 'waiting_tokens', 'waiting0', 'waiting1', 'waiting2', 'waiting3')
if not row.again and stopped().paused then return { 'paused' } end
if not row.again and is_shed(row.class) then return { 'shed' } end
local depth, tokens = 0, counter('waiting_tokens')
for class = 0, 3 do depth = depth + counter('waiting' .. class) end
if depth >= row.waiting_max or (depth > 0 and tokens + row.input > row.tokens_max) then
  return { 'full', 'model', depth, tokens }
end
local theirs = tonumber(call('HGET', DEPTHS, row.tenant) or '0')
local their_tokens = tonumber(call('HGET', DEPTHS, row.tenant .. '|tokens') or '0')
if theirs >= row.tenant_waiting_max or (theirs > 0 and their_tokens + row.input > row.tenant_tokens_max) then
  return { 'full', 'tenant', theirs, their_tokens }
end

local alive = call('ZCARD', LEASES) > 0
local delay_ms, home_ms = row.delay_ms, row.home_ms
row.waiting_max, row.tokens_max, row.tenant_waiting_max, row.tenant_tokens_max, row.delay_ms, row.home_ms = nil
row.again = nil
row.facts, row.entered_ms, row.due_ms = ARGV[4], now, now + row.due_ms
row.arrival = call('HINCRBY', COUNTERS, 'arrival', 1)
for name, default in pairs(DEFAULTS.__index) do
  if row[name] == default then row[name] = nil end
end
setmetatable(row, DEFAULTS)
row.bodied = ARGV[5] ~= ''
be_patient(row)
if row.gateway ~= '' then
  call('ZADD', HOMES, 0, row.gateway .. '|' .. id)
  call('ZADD', GATEWAYS, 'GT', now + home_ms, row.gateway)
end
if sheds(row) then
  conclude(id, row, 'shed', NOTHING, SHED)
  return { 'accepted', 0, 1 }
end
if row.shown and not row.rerunnable then
  conclude(id, row, 'worker_lost', NOTHING, 'the queue lost it in the middle of a sampled answer')
  return { 'accepted', 0, 1 }
end
call('HSET', TASKS, id, ARGV[3])
if ARGV[5] ~= '' then call('SET', KEYS[EXTRA], ARGV[5], 'PX', ARGV[7]) end
if ARGV[6] ~= '' then call('SET', KEYS[EXTRA + 1], ARGV[6], 'PX', ARGV[7]) end
if delay_ms > 0 then
  row.state = 'delayed'
  call('ZADD', DELAYS, now + delay_ms, id)
  keep(id, row)
  return { 'accepted', depth + 1, alive and 1 or 0 }
end
if not alive then hold(id, row) end
join(id, row)
keep(id, row)

-- Of the workers that hold its prefix the one with most room is woken alone; others may have it after the steal.
local most, wake_key = 0, nil
local at = EXTRA + 2
for worker in string.gmatch(row.preferred, '[^,]+') do
  local slots = tonumber(call('HGET', ROOMS, worker) or '0')
  if slots > most and not crowded(worker) then most, wake_key = slots, KEYS[at] end
  at = at + 1
end
if wake_key then
  call('ZADD', wake_key, 0, '0')
  call('PEXPIRE', wake_key, 60000)
else
  wake()
end
if row.class < 2 then -- it may have to preempt somebody
  local room = 0
  for _, free in ipairs(call('HVALS', ROOMS)) do room = room + math.max(0, tonumber(free)) end
  if room <= 0 then call('PUBLISH', PREFIX .. 'urgent', row.class) end
end
return { 'accepted', place_of(id, row), alive and 1 or 0 }
