-- announce: somebody is here, and says how it is.
-- KEYS   1 rows HASH   2 seen ZSET
-- ARGV   1 name   2 row
-- reply  1                                   cost O(log n)      Repeat: safe.
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('ZADD', KEYS[2], now_ms(), ARGV[1])
return 1
