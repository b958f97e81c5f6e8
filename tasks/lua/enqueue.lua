-- enqueue: accept a task, once per id.
-- KEYS   + body STRING
-- ARGV   2 id  3 message  4 class  5 tenant  6 gateway  7 rerunnable  8 input tokens  9 ms it may wait (0: any)
--        10 delay ms  11 facts ('' : no usage entry)  12 body ('' : none)  13 body TTL ms  14 most that may wait
--        15 attempts it had and 16 tokens it delivered before the store forgot it
--        17 weight of the tenant  18 ms after which it is overdue
-- reply  {'accepted', place} | {'known', state} | {'full', waiting}        cost O(log n)
-- Repeat: safe, the row is the duplicate check.
local id, class, input = ARGV[2], tonumber(ARGV[4]), tonumber(ARGV[8])
local known = row_of(id)
if known then return { 'known', known.state } end

local depth = 0
for c = 0, 3 do depth = depth + counter('waiting' .. c) end
if depth >= tonumber(ARGV[14]) then return { 'full', depth } end

local row = {
  class = class, tenant = ARGV[5], gateway = ARGV[6], rerunnable = ARGV[7] == '1', input = input,
  deadline_ms = tonumber(ARGV[9]) > 0 and now + tonumber(ARGV[9]) or 0, facts = ARGV[11], arrival = call('HINCRBY', COUNTERS, 'arrival', 1),
  entered_ms = now, attempt = tonumber(ARGV[15]), losses = 0, first_ms = 0, worker = '', cancelled = false,
  weight = tonumber(ARGV[17]), due_ms = now + tonumber(ARGV[18]), served = 0, -- output tokens charged
}
count('enqueued', 1)
if tonumber(ARGV[16]) > 0 and not row.rerunnable then
  conclude(id, row, 'worker_lost', NOTHING, 'the queue lost it in the middle of a sampled answer')
  return { 'accepted', 0 }
end
call('HSET', TASKS, id, ARGV[3])
if ARGV[12] ~= '' then call('SET', KEYS[EXTRA], ARGV[12], 'PX', ARGV[13]) end
if tonumber(ARGV[10]) > 0 then
  row.state = 'delayed'
  call('ZADD', DELAYS, now + tonumber(ARGV[10]), id)
  keep(id, row)
  return { 'accepted', depth + 1 }
end
join(id, row)
keep(id, row)
return { 'accepted', place_of(id, row) }
