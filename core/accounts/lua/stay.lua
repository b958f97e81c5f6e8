-- stay: sockets of a key are open still, also if the store has forgotten them.
-- KEYS   1 sockets ZSET {socket -> until ms}
-- ARGV   1 ms that they count    2 … sockets
-- reply  how many          cost O(n log n) of those named
-- Repeat: safe.
local till = now_ms() + tonumber(ARGV[1])
for i = 2, #ARGV do redis.call('ZADD', KEYS[1], till, ARGV[i]) end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return #ARGV - 1
