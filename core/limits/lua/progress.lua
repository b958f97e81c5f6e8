-- progress: what requests of one organisation have generated so far. The worker's leash.
-- KEYS   pairs: hold HASH, counter HASH of its key
-- ARGV   one number per pair: tokens so far, in all
-- reply  per pair: 1 open | 0 not open (settled, or never reserved)           cost O(pairs)
-- Repeat: safe, only what is more than was charged before is added.
local reply = {}
local bin = 't' .. math.floor(now_ms() / 1000)
for pair = 1, #ARGV do
  local hold, counter = KEYS[2 * pair - 1], KEYS[2 * pair]
  local state, charged = unpack(redis.call('HMGET', hold, 'state', 'charged'))
  local open = state == 'open'
  if open then
    local more = math.max(0, tonumber(ARGV[pair]) - tonumber(charged))
    redis.call('HINCRBY', counter, bin, more)
    redis.call('HSET', hold, 'charged', charged + more)
  end
  reply[pair] = open and 1 or 0
end
return reply
