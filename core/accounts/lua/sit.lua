-- sit: count a socket of a key, unless it has as many as it may. Those that nobody has spoken of in time do not count.
-- KEYS   1 sockets ZSET {socket -> until ms}
-- ARGV   1 socket    2 how many the key may have    3 ms that it counts
-- reply  1 counted | 0 the key has as many as it may          cost O(log n)
-- Repeat: safe, the same socket counts once.
local now = now_ms()
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
local known = redis.call('ZSCORE', KEYS[1], ARGV[1])
if not known and redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[2]) then return 0 end
redis.call('ZADD', KEYS[1], now + tonumber(ARGV[3]), ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
