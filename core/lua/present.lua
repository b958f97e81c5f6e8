-- present: who is here. Rows not renewed for `forget` ms are gone, and removed.
-- KEYS   1 rows HASH   2 seen ZSET
-- ARGV   1 forget ms
-- reply  {row, ms since it was seen, …}      cost O(rows)       Repeat: safe.
local now = now_ms()
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now - tonumber(ARGV[1]))) do
  redis.call('HDEL', KEYS[1], name)
  redis.call('ZREM', KEYS[2], name)
end
local reply = {}
for _, name in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
  local row = redis.call('HGET', KEYS[1], name)
  if row then
    reply[#reply + 1] = row
    reply[#reply + 1] = now - redis.call('ZSCORE', KEYS[2], name)
  end
end
return reply
