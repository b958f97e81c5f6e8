-- fail: count an attempt with a key that is not known as good, unless as many as may fail have failed in the window.
-- KEYS   1 times LIST of 'ms attempt', oldest first, of the attempts that are counted
-- ARGV   1 how many may fail    2 the window, ms    3 the attempt
-- reply  0 it is counted | ms until one would be counted          cost O(how many may fail)
-- Repeat: safe, attempts have names. A refusal writes nothing, so it puts nothing off.
local now, most, window = now_ms(), tonumber(ARGV[1]), tonumber(ARGV[2])
local times, past = redis.call('LRANGE', KEYS[1], 0, -1), 0
local function at(i) return tonumber(string.match(times[i], '^%d+')) end
for _, one in ipairs(times) do
  if string.match(one, ' (.*)$') == ARGV[3] then return 0 end
end
while past < #times and at(past + 1) <= now - window do past = past + 1 end
if #times - past >= most then return at(#times - most + 1) + window - now end
if past > 0 then redis.call('LTRIM', KEYS[1], past, -1) end
redis.call('RPUSH', KEYS[1], string.format('%.0f %s', now, ARGV[3]))
redis.call('PEXPIRE', KEYS[1], window)
return 0
