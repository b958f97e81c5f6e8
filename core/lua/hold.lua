-- hold: a worker begins a request, and soon has the blocks of its prompt in its cache.
-- ARGV   1 worker  2 hold ms  3 most hashes  4 most workers of one hash  5 TTL ms of the index  6.. hashes
-- reply  hashes in the index                          cost O(hashes log n)
-- Repeat: safe, the worker is named once.
local worker, due = ARGV[1], now + tonumber(ARGV[2])
local marks = { unpack(ARGV, 6) }
if #marks == 0 then return redis.call('ZCARD', HOLDERS_DUE) end

local fields, scores = {}, {}
for n, entry in ipairs(redis.call('HMGET', HOLDERS, unpack(marks))) do
  local entries = holders_in(entry, worker)
  table.insert(entries, 1, worker .. '|' .. string.format('%.0f', due))
  fields[2 * n - 1], fields[2 * n] = marks[n], table.concat(entries, ';', 1, math.min(#entries, tonumber(ARGV[4])))
  scores[2 * n - 1], scores[2 * n] = due, marks[n]
end
redis.call('HSET', HOLDERS, unpack(fields))
redis.call('ZADD', HOLDERS_DUE, 'GT', unpack(scores))
redis.call('PEXPIRE', HOLDERS, ARGV[5])
redis.call('PEXPIRE', HOLDERS_DUE, ARGV[5])

-- Each call takes out more than it puts in, so the index shrinks to its bound and never waits for a timer.
local room = 2 * #marks
local gone = redis.call('ZRANGEBYSCORE', HOLDERS_DUE, '-inf', now, 'LIMIT', 0, room)
local above = redis.call('ZCARD', HOLDERS_DUE) - tonumber(ARGV[3])
if above > #gone then gone = redis.call('ZRANGE', HOLDERS_DUE, 0, math.min(above, room) - 1) end
if #gone > 0 then
  redis.call('HDEL', HOLDERS, unpack(gone))
  redis.call('ZREM', HOLDERS_DUE, unpack(gone))
end
return redis.call('ZCARD', HOLDERS_DUE)
