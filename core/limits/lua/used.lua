-- used: what scopes have used in the window, hold, and have left. Writes nothing.
-- KEYS   counter HASH per scope
-- ARGV   per scope: requests, tokens, input, output in 60 s (-1: no limit)
-- reply  per scope {requests, input, output, held input, held output, open requests, LEFT as in reserve}
-- cost O(scopes)
local reply = {}
for i, key in ipairs(KEYS) do
  local c = load(key)
  reply[i] = { c.requests, c.input, c.output, c.held_in, c.held_out, c.running }
  local arg = 4 * i - 3
  tell(reply[i], c, { requests = tonumber(ARGV[arg]), tokens = tonumber(ARGV[arg + 1]),
    input = tonumber(ARGV[arg + 2]), output = tonumber(ARGV[arg + 3]) })
end
return reply
