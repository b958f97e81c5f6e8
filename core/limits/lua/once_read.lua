-- once_read: one more, or one fewer, reads the answer that a key stands for.
-- KEYS   1 entry HASH {id, body, begun, r:<reader>}
-- ARGV   1 request id   2 reader   3 'join' | 'leave'   4 most readers
-- reply  readers beside this one | -1 the key does not stand for this request any more | -2 too many read it
-- Repeat: safe, readers have names.                                                               cost O(readers)
if redis.call('HGET', KEYS[1], 'id') ~= ARGV[1] then return -1 end
local reader = 'r:' .. ARGV[2]
redis.call('HDEL', KEYS[1], reader)
local others = redis.call('HLEN', KEYS[1]) - 3
if ARGV[3] == 'leave' then return others end
if others >= tonumber(ARGV[4]) then return -2 end
redis.call('HSET', KEYS[1], reader, 1)
return others
