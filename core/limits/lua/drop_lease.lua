-- drop_lease: forget what a scope has spent. Whoever asks for its money next opens a lease with another number.
-- KEYS   1 money HASH   2 leases HASH
-- ARGV   1 scope   2 number of the lease: a later one stays   3 '1': whatever is held
-- reply  1 dropped | 0 not: it is another, or requests hold money of it                                cost O(1)
-- Repeat: safe. What runs under it is charged when it is ingested (late.lua).
local lease, held = unpack(call('HMGET', KEYS[1], 'lease', 'held'))
if lease and (lease ~= ARGV[2] or (ARGV[3] ~= '1' and tonumber(held) > 0)) then return 0 end
call('DEL', KEYS[1])
call('HDEL', KEYS[2], ARGV[1])
return lease and 1 or 0
