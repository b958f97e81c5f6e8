-- project: keep a key's record where gateways look first. A revoked record never gives way to one that is not, so a
-- slow writer that read Postgres before a revocation cannot bring the key back.
-- KEYS   1 key HASH {record, revoked}
-- ARGV   1 record (msgpack; opaque here, cmsgpack cannot read its bytes)    2 '1' when it is revoked, else '0'
--        3 seconds to live
-- reply  1 written | 0 the revoked one stays          cost O(1)
-- Repeat: safe, the same record is written again.
local stays = ARGV[2] ~= '1' and redis.call('HGET', KEYS[1], 'revoked') == '1'
if not stays then redis.call('HSET', KEYS[1], 'record', ARGV[1], 'revoked', ARGV[2]) end
redis.call('EXPIRE', KEYS[1], ARGV[3])
return stays and 0 or 1
