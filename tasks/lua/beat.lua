-- beat: a worker is alive. Its lease is renewed, its claims are compared by their sum, its long requests are charged.
-- ARGV   2 worker  3 lease ms  4 sum of the claims it knows of ('' : it is leaving, forget its lease)
--        5.. triples id, attempt, output tokens so far: of requests that have made many since they were last charged
-- reply  {1, urgent}: the sums agree | {0, urgent, id, attempt, cancelled, gateway, …}: its claims as they are
--        urgent: the most urgent class in which something waits that may be claimed; 9: nothing does
-- Repeat: safe. Cost O(triples log n), and O(claims) on 0.
local worker, lease_ms = ARGV[2], tonumber(ARGV[3])
if ARGV[4] == '' then
  bury(worker, 1024, false)
  if call('ZCARD', WAITING) > 0 then wake() end -- it may have taken the marker while it left
  return { 1, 9 }
end
hear()
note('lease_ms', lease_ms)
call('ZADD', LEASES, now + lease_ms, worker)
timers(64)
for i = 5, #ARGV, 3 do
  local row = row_of(ARGV[i])
  if row and row.state == 'running' and row.worker == worker and row.attempt == tonumber(ARGV[i + 1]) then
    local tokens = tonumber(ARGV[i + 2])
    serve(row.tenant, OUTPUT_COST * (tokens - row.served) / row.weight)
    row.served = math.max(tokens, row.served)
    keep(ARGV[i], row)
  end
end
local first = not stopped().paused and lines(0, 0)[1]
local urgent = first and tonumber(string.match(first, '^%d')) or 9
if sum_of(worker) == tonumber(ARGV[4]) then return { 1, urgent } end
local reply = { 0, urgent }
local ids = claims_of(worker, 4096)
look_up(ids)
for _, id in ipairs(ids) do
  local row = row_of(id)
  reply[#reply + 1] = id
  reply[#reply + 1] = row.attempt
  reply[#reply + 1] = row.cancelled ~= '' and 1 or 0
  reply[#reply + 1] = row.gateway
end
return reply
