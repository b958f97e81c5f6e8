-- mint: a key is given one more client secret, unless it was given as many as it may in the window.
-- KEYS   1 minted ZSET hash of a secret -> when it was given, ms
-- ARGV   1 the hash   2 how many in the window   3 the window, ms
-- reply  0 it is counted | ms until one would be                                cost O(log how many + what is old)
-- Repeat: safe, a secret is counted once. A refusal writes nothing.
local now, most, window = now_ms(), tonumber(ARGV[2]), tonumber(ARGV[3])
if redis.call('ZSCORE', KEYS[1], ARGV[1]) then return 0 end
if redis.call('ZCOUNT', KEYS[1], '(' .. (now - window), '+inf') >= most then
  local oldest = redis.call('ZREVRANGE', KEYS[1], most - 1, most - 1, 'WITHSCORES')[2]
  return math.max(1, tonumber(oldest) + window - now)
end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - window)
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('PEXPIRE', KEYS[1], window)
return 0
