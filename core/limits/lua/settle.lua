-- settle: the request has ended. Give back its place, charge what was not charged before. Exactly once.
-- KEYS   1 hold HASH   2 open ZSET   3.. one counter HASH per scope
-- ARGV   1 request id   2 tokens used in all   3 seconds to remember the hold
-- reply  1 settled | 0 settled before, or never held                          cost O(scopes), writes only on 1
-- Repeat: safe, `state` is the guard.   Mints nothing: a charge is only ever added, never taken back.
local state, charged = unpack(redis.call('HMGET', KEYS[1], 'state', 'charged'))
if state ~= 'open' then return 0 end
local more = math.max(0, tonumber(ARGV[2]) - tonumber(charged))
local bin = 't' .. math.floor(now_ms() / 1000)
for scope = 3, #KEYS do
  redis.call('HINCRBY', KEYS[scope], bin, more)
  redis.call('HINCRBY', KEYS[scope], 'running', -1)
end
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('HSET', KEYS[1], 'state', 'settled', 'charged', charged + more)
redis.call('EXPIRE', KEYS[1], ARGV[3])
return 1
