-- used: what a scope has used in the last minute. Writes nothing.
-- KEYS   1 counter HASH
-- reply  {requests begun in 60 s, tokens in 60 s, requests open, ms until the oldest counted request is forgotten}
-- cost O(60)
local WINDOW_S = 60
local now = now_ms()
local first = math.floor(now / 1000) - WINDOW_S
local requests, tokens, open, oldest = 0, 0, 0, nil
local fields = redis.call('HGETALL', KEYS[1])
for i = 1, #fields, 2 do
  local what, at = string.match(fields[i], '^([rt])(%d+)$')
  if fields[i] == 'running' then open = tonumber(fields[i + 1])
  elseif what and tonumber(at) >= first then
    if what == 'r' then
      requests = requests + tonumber(fields[i + 1])
      oldest = math.min(oldest or tonumber(at), tonumber(at))
    else
      tokens = tokens + tonumber(fields[i + 1])
    end
  end
end
return { requests, tokens, open, oldest and (oldest + WINDOW_S + 1) * 1000 - now or 0 }
