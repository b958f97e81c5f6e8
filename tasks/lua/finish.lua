-- finish: the worker that has the claims ends the requests. Output that no beat has charged is charged to its tenant.
-- KEYS   + for each request: body STRING, view STRING
-- ARGV   2 worker  3 msgpack list, for each request a list: id, attempt, outcome, input, cached, output, reasoning
--        tokens, message, whether it is to be kept as a dead letter
-- reply  for each: 1 ended by this call | 2 this attempt ended before: a repeat | 0 fenced: somebody else's
-- Repeat: safe, an ended row is never ended again.                              cost O(requests log n)
local bodies = {} -- to be deleted
local function finish(close, body, view)
  local id, attempt, outcome, input, cached, output, reasoning, message, dead = unpack(close)
  local row = row_of(id)
  if not row or row.attempt ~= attempt or row.worker ~= ARGV[2] then return 0 end
  if row.state == 'ended' then return 2 end
  if row.state ~= 'running' then return 0 end
  serve(row.tenant, OUTPUT_COST * (output - row.served) / row.weight)
  if outcome == 'cancelled' and row.cancelled ~= '' then outcome = row.cancelled end
  if dead then dead_letter(id, row, message) else bodies[#bodies + 1] = body end
  local usage = { input_tokens = input, cached_tokens = cached, output_tokens = output, reasoning_tokens = reasoning }
  conclude(id, row, outcome, usage, message)
  call('PEXPIRE', view, FORGET_MS)
  return 1
end

local closes, ids, reply = cmsgpack.unpack(ARGV[3]), {}, {}
for i, close in ipairs(closes) do ids[i] = close[1] end
look_up(ids)
for i, close in ipairs(closes) do reply[i] = finish(close, KEYS[EXTRA + 2 * i - 2], KEYS[EXTRA + 2 * i - 1]) end
if #bodies > 0 then call('DEL', unpack(bodies)) end
return reply
