-- stopped_set: stop an organisation or a key, or let an organisation go on.
-- KEYS   1 stopped HASH {field -> why, mark}
-- ARGV   1 field    2 why ('' : it goes on)    3 a mark that no other change has
-- reply  1          cost O(1)
-- Repeat: safe. By the mark a projection that read Postgres before sees that it comes too late.
redis.call('HSET', KEYS[1], 'mark', ARGV[3])
if ARGV[2] == '' then redis.call('HDEL', KEYS[1], ARGV[1]) else redis.call('HSET', KEYS[1], ARGV[1], ARGV[2]) end
return 1
