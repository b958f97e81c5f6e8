-- cancel: the caller no longer wants it. A running request keeps its claim until its worker, or the reaper, ends it.
-- KEYS   + body STRING, view STRING
-- ARGV   2 id  3 the gateway that says so ('' : whoever asks may): its word counts only while the stream is open there
-- reply  'unknown' | 'ended' | 'elsewhere' (its stream has moved) | 'cancelled' (it waited: no engine work was spent)
--        | 'running' (its worker was told) | 'left' (background work goes on without that gateway)
-- Repeat: safe. Cost O(log n).
local id = ARGV[2]
local row = row_of(id)
if not row then return 'unknown' end
if row.state == 'ended' then return 'ended' end
if ARGV[3] ~= '' and row.gateway ~= ARGV[3] then return 'elsewhere' end
if ARGV[3] ~= '' and row.background then
  move(id, row, '')
  return 'left'
end
if row.state ~= 'running' then
  conclude(id, row, 'cancelled', NOTHING, '')
  call('DEL', KEYS[EXTRA])
  call('PEXPIRE', KEYS[EXTRA + 1], FORGET_MS)
  return 'cancelled'
end
stop(id, row, 'cancelled')
return 'running'
