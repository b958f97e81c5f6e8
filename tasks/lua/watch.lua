-- watch: a gateway is alive and asks after its open requests. It finds an ending whose frame was lost.
-- ARGV   2 gateway  3 ms after which it counts as gone, and what was open there as orphaned  4.. ids (at most 500)
-- reply  {{waiting, waiting tokens, started ever, workers alive}, for each id: '' unknown | {'waiting', place}
--        | {'running', attempt} | {'ended', packed ending} | {'elsewhere'}: another gateway has its stream}
-- Repeat: safe. Cost O(ids log n).
hear()
call('ZADD', GATEWAYS, now + tonumber(ARGV[3]), ARGV[2])
timers(16)
local depth = 0
for class = 0, 3 do depth = depth + counter('waiting' .. class) end
local reply = { { depth, counter('waiting_tokens'), counter('started'), call('ZCARD', LEASES) } }
if #ARGV < 4 then return reply end
local ids = { unpack(ARGV, 4) }
look_up(ids)
for i, id in ipairs(ids) do
  local row = row_of(id)
  if not row then reply[i + 1] = ''
  elseif row.state == 'ended' then reply[i + 1] = { 'ended', cmsgpack.pack(row.ending) }
  elseif row.gateway ~= '' and row.gateway ~= ARGV[2] then reply[i + 1] = { 'elsewhere' }
  elseif row.state == 'running' then reply[i + 1] = { 'running', row.attempt }
  else reply[i + 1] = { 'waiting', row.state == 'waiting' and place_of(id, row) or 0 } end
end
return reply
