-- finish: the worker that has the claims ends the requests. Output that no beat has charged is charged to its tenant.
-- KEYS   + for each request: body STRING, view STRING
-- ARGV   2 worker  then nine for each request: id, attempt, outcome, input, cached, output, reasoning tokens, message,
--        1 when it is to be kept as a dead letter
-- reply  for each: 1 ended by this call | 2 this attempt ended before: a repeat | 0 fenced: somebody else's
-- Repeat: safe, an ended row is never ended again.                              cost O(requests log n)
local function finish(at, key)
  local id, attempt, outcome = ARGV[at], tonumber(ARGV[at + 1]), ARGV[at + 2]
  local row = row_of(id)
  if not row or row.attempt ~= attempt or row.worker ~= ARGV[2] then return 0 end
  if row.state == 'ended' then return 2 end
  if row.state ~= 'running' then return 0 end
  local usage = {
    input_tokens = tonumber(ARGV[at + 3]), cached_tokens = tonumber(ARGV[at + 4]),
    output_tokens = tonumber(ARGV[at + 5]), reasoning_tokens = tonumber(ARGV[at + 6]),
  }
  serve(row.tenant, OUTPUT_COST * (usage.output_tokens - row.served) / row.weight)
  if outcome == 'cancelled' and row.cancelled ~= '' then outcome = row.cancelled end
  local dead = ARGV[at + 8] == '1'
  if dead then dead_letter(id, row, ARGV[at + 7]) end
  conclude(id, row, outcome, usage, ARGV[at + 7])
  if not dead then call('DEL', key) end
  return 1
end

local reply = {}
local at, key = 3, EXTRA
while ARGV[at] do
  reply[#reply + 1] = finish(at, KEYS[key])
  call('PEXPIRE', KEYS[key + 1], FORGET_MS)
  at, key = at + 9, key + 2
end
return reply
