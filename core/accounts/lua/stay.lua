-- stay: sockets of an organisation are open still, also if the store has forgotten them.
-- KEYS   sockets ZSET {socket -> until ms} of each scope
-- ARGV   1 ms that they count    then for each scope: how many sockets, and these
-- reply  how many, of all scopes          cost O(n log n) of those named
-- Repeat: safe.
local till, at, told = now_ms() + tonumber(ARGV[1]), 2, 0
for scope = 1, #KEYS do
  local count = tonumber(ARGV[at])
  for i = at + 1, at + count do redis.call('ZADD', KEYS[scope], till, ARGV[i]) end
  redis.call('PEXPIRE', KEYS[scope], ARGV[1])
  at, told = at + 1 + count, told + count
end
return told
