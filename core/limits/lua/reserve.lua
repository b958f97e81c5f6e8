-- reserve: open a hold, in every scope or in none.
-- KEYS   1 hold HASH {state, model, scopes, charged}   2 open ZSET   3.. one counter HASH per scope
-- ARGV   1 request id   2 model   3 names of the scopes   4.. per scope: requests in 60 s, concurrent requests   (-1: no limit)
-- reply  {1, per scope: requests left, ms until all are free} | {0, scope (1..), 'requests' | 'concurrency', retry after ms (-1: when one ends)}
-- Repeat: safe, `state` is the guard. A refusal writes nothing.       cost O(scopes * 60)
local WINDOW_S = 60
local now = now_ms()
local second = math.floor(now / 1000)
local repeated = redis.call('HGET', KEYS[1], 'state')

-- Requests begun in the window: its bins are whole seconds, and the oldest counts until all of it has left.
local function window(counter)
  local total, oldest, old = 0, second, {}
  local fields = redis.call('HGETALL', counter)
  for i = 1, #fields, 2 do
    local at = tonumber(string.match(fields[i], '^r(%d+)$'))
    if at and at <= second - WINDOW_S - 1 then old[#old + 1] = fields[i]
    elseif at then
      total = total + tonumber(fields[i + 1])
      oldest = math.min(oldest, at)
    elseif string.match(fields[i], '^t(%d+)$') and tonumber(string.sub(fields[i], 2)) <= second - WINDOW_S - 1 then
      old[#old + 1] = fields[i]
    end
  end
  return total, oldest, old
end

local left, stale = {}, {}
for scope = 3, #KEYS do
  local counter = KEYS[scope]
  local most_requests, most_running = tonumber(ARGV[2 * scope - 2]), tonumber(ARGV[2 * scope - 1])
  local begun, oldest, old = window(counter)
  local frees_ms = (oldest + WINDOW_S + 1) * 1000 - now
  if not repeated then
    if most_running >= 0 and tonumber(redis.call('HGET', counter, 'running') or '0') >= most_running then
      return { 0, scope - 2, 'concurrency', -1 }
    end
    if most_requests >= 0 and begun + 1 > most_requests then
      return { 0, scope - 2, 'requests', begun > 0 and frees_ms or -1 }
    end
    begun = begun + 1
  end
  left[#left + 1] = most_requests >= 0 and most_requests - begun or -1
  left[#left + 1] = (WINDOW_S + 1) * 1000
  stale[scope] = old
end
if repeated then return { 1, unpack(left) } end

for scope = 3, #KEYS do
  redis.call('HINCRBY', KEYS[scope], 'r' .. second, 1)
  redis.call('HINCRBY', KEYS[scope], 'running', 1)
  if #stale[scope] > 0 then redis.call('HDEL', KEYS[scope], unpack(stale[scope])) end
end
redis.call('HSET', KEYS[1], 'state', 'open', 'model', ARGV[2], 'scopes', ARGV[3], 'charged', 0)
redis.call('ZADD', KEYS[2], now, ARGV[1])
return { 1, unpack(left) }
