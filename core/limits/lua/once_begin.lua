-- once_begin: a request takes a key, or is told who has it.
-- KEYS   1 entry HASH {id, body, begun, r:<reader>}
-- ARGV   1 request id   2 reader   3 hash of path and body   4 id that may be replaced ('': none)   5 ms to remember
-- reply  {1 the key is this request's | 0 another's, the other's id, 1 same body | 0 another, ms since it was taken}
-- Repeat: safe, who has it already has it.                                                        cost O(1)
local id, body, begun = unpack(redis.call('HMGET', KEYS[1], 'id', 'body', 'begun'))
local now = now_ms()
if id and id ~= ARGV[1] and id ~= ARGV[4] then
  return { 0, id, body == ARGV[3] and 1 or 0, math.max(0, now - tonumber(begun)) }
end
if id ~= ARGV[1] then
  redis.call('DEL', KEYS[1])
  redis.call('HSET', KEYS[1], 'id', ARGV[1], 'body', ARGV[3], 'begun', now, 'r:' .. ARGV[2], 1)
  redis.call('PEXPIRE', KEYS[1], ARGV[5])
end
return { 1, ARGV[1], 1, 0 }
