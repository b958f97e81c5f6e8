-- project: keep a key's record where gateways look first. A revoked record never gives way to one that is not, so a
-- slow writer that read Postgres before a revocation cannot bring the key back; nor does one that was read before the
-- record there, by up to a minute (more than that is a clock that was put back) undo a limit.
-- KEYS   1 key HASH {record, revoked, read}
-- ARGV   1 record (msgpack; opaque here, cmsgpack cannot read its bytes)    2 '1' when it is revoked, else '0'
--        3 seconds to live    4 when Postgres was read, µs by its clock (0: not known)
-- reply  1 it is there, or one that was read later | 0 a revoked one is, and stays          cost O(1)
-- Repeat: safe, the same record is written again.
local revoked, read = unpack(redis.call('HMGET', KEYS[1], 'revoked', 'read'))
local over = revoked == '1' and ARGV[2] ~= '1'
local behind = tonumber(read or 0) - tonumber(ARGV[4])
local late = ARGV[2] ~= '1' and ARGV[4] ~= '0' and behind > 0 and behind < 60000000
if not over and not late then redis.call('HSET', KEYS[1], 'record', ARGV[1], 'revoked', ARGV[2], 'read', ARGV[4]) end
redis.call('EXPIRE', KEYS[1], ARGV[3])
return over and 0 or 1
