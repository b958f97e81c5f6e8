-- schema_note: an organisation sends a schema. Count it, if it was not sent within the minute, or refuse it.
-- KEYS   1 schemas ZSET hash -> when it was sent last, ms
-- ARGV   1 hash   2 different ones in a minute at most   3 the minute, ms
-- reply  {1, 0} it may go on | {0, ms until the oldest is a minute old}
-- A refusal writes nothing.   Repeat: safe, one that was sent is counted once.          cost O(log most + what is old)
local schemas, hash, most, minute = KEYS[1], ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local now = now_ms()
local since = now - minute
local seen = redis.call('ZSCORE', schemas, hash)
if not (seen and tonumber(seen) > since) and redis.call('ZCOUNT', schemas, '(' .. since, '+inf') >= most then
  -- The one that makes room is the last but `most - 1`, should there ever be more than `most`.
  local oldest = redis.call('ZREVRANGE', schemas, most - 1, most - 1, 'WITHSCORES')[2]
  return { 0, math.max(1, tonumber(oldest) + minute - now) }
end
redis.call('ZREMRANGEBYSCORE', schemas, '-inf', since)
redis.call('ZADD', schemas, 'GT', now, hash)
redis.call('PEXPIRE', schemas, minute)
return { 1, 0 }
