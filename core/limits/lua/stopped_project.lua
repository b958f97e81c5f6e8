-- stopped_project: what Postgres says is stopped. Revoked keys are added, never taken away; the organisation is stopped,
-- or goes on, unless somebody has said otherwise since the mark was read, which was before Postgres was.
-- KEYS   1 stopped HASH {field -> why, mark}
-- ARGV   1 the mark as it was read ('' : there was none)    2 why the organisation is stopped ('' : it goes on)
--        3 … keys' fields and why, in pairs
-- reply  1 written | 0 something was changed meanwhile: only keys were added          cost O(keys)
-- Repeat: safe.
for at = 3, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[at], ARGV[at + 1]) end
if (redis.call('HGET', KEYS[1], 'mark') or '') ~= ARGV[1] then return 0 end
if ARGV[2] == '' then redis.call('HDEL', KEYS[1], 'org') else redis.call('HSET', KEYS[1], 'org', ARGV[2]) end
return 1
