-- leave: a socket is closed.
-- KEYS   sockets ZSET {socket -> until ms} of each scope
-- ARGV   1 socket
-- reply  in how many scopes it was counted          cost O(scopes log n)
-- Repeat: safe, it is gone.
local counted = 0
for scope = 1, #KEYS do counted = counted + redis.call('ZREM', KEYS[scope], ARGV[1]) end
return counted
