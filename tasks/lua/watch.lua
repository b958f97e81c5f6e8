-- watch: a gateway is alive and asks after its open requests. It finds an ending whose frame was lost.
-- ARGV   2 gateway  3 lease ms  4.. ids (at most 500)
-- reply  for each id: '' unknown | {'waiting', place} | {'running', attempt} | {'ended', packed ending}
-- Repeat: safe. Cost O(ids log n).
call('ZADD', GATEWAYS, now + tonumber(ARGV[3]), ARGV[2])
call('ZREMRANGEBYSCORE', GATEWAYS, '-inf', now)
timers(16)
local reply = {}
for i = 4, #ARGV do
  local row = row_of(ARGV[i])
  if not row then reply[#reply + 1] = ''
  elseif row.state == 'ended' then reply[#reply + 1] = { 'ended', cmsgpack.pack(row.ending) }
  elseif row.state == 'running' then reply[#reply + 1] = { 'running', row.attempt }
  else reply[#reply + 1] = { 'waiting', row.state == 'waiting' and place_of(ARGV[i], row) or 0 } end
end
return reply
