-- sit: count a socket in all its scopes, or in none: one that is full refuses it. Those that nobody has spoken of in
-- time do not count.
-- KEYS   sockets ZSET {socket -> until ms} of each scope, narrowest first
-- ARGV   1 socket    2 ms that it counts    3.. how many each scope may have, -1: any number
-- reply  0 counted | the first scope that is full, from 1          cost O(scopes log n), and what it prunes
-- Repeat: safe, the same socket counts once. A refusal counts nothing.
local now = now_ms()
for scope = 1, #KEYS do
  local most = tonumber(ARGV[scope + 2])
  if most >= 0 and not redis.call('ZSCORE', KEYS[scope], ARGV[1])
    and redis.call('ZCOUNT', KEYS[scope], '(' .. string.format('%d', now), '+inf') >= most then return scope end
end
for scope = 1, #KEYS do
  redis.call('ZREMRANGEBYSCORE', KEYS[scope], '-inf', now)
  redis.call('ZADD', KEYS[scope], now + tonumber(ARGV[2]), ARGV[1])
  redis.call('PEXPIRE', KEYS[scope], ARGV[2])
end
return 0
