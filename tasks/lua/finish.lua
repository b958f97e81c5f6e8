-- finish: the worker that has the claim ends the request. Output that no beat has charged is charged to its tenant.
-- KEYS   + body STRING
-- ARGV   2 worker  3 id  4 attempt  5 outcome  6 input  7 cached  8 output  9 reasoning tokens  10 message
-- reply  1 ended by this call | 2 this attempt ended before: a repeat | 0 fenced: somebody else's        cost O(log n)
-- Repeat: safe, an ended row is never ended again.
local id, attempt = ARGV[3], tonumber(ARGV[4])
local row = row_of(id)
if not row or row.attempt ~= attempt or row.worker ~= ARGV[2] then return 0 end
if row.state == 'ended' then return 2 end
if row.state ~= 'running' then return 0 end
local usage = {
  input_tokens = tonumber(ARGV[6]), cached_tokens = tonumber(ARGV[7]),
  output_tokens = tonumber(ARGV[8]), reasoning_tokens = tonumber(ARGV[9]),
}
serve(row.tenant, OUTPUT_COST * (usage.output_tokens - row.served) / row.weight)
conclude(id, row, ARGV[5], usage, ARGV[10])
call('DEL', KEYS[EXTRA])
return 1
