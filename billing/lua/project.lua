-- project: keep the current prices where admission pins them. A price never gives way to one that took effect before
-- it, so a slow writer that read Postgres before a change cannot undo it.
-- KEYS   1 current HASH {model|tier: price, a msgpack map with since_ms; '': there are all of them}
-- ARGV   field, price, since_ms, and so on for each
-- reply  the number written          cost O(prices)
-- Repeat: safe, the same prices are written again.
local written = 0
for i = 1, #ARGV, 3 do
  local known = redis.call('HGET', KEYS[1], ARGV[i])
  if not known or cmsgpack.unpack(known).since_ms <= tonumber(ARGV[i + 2]) then
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
    written = written + 1
  end
end
redis.call('HSET', KEYS[1], '', 1)
return written
