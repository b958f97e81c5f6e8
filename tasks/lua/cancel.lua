-- cancel: the caller no longer wants it. A running request keeps its claim until its worker, or the reaper, ends it.
-- KEYS   + body STRING
-- ARGV   2 id
-- reply  'unknown' | 'ended' | 'cancelled' (it waited: no engine work was spent) | 'running' (its worker was told)
-- Repeat: safe. Cost O(log n).
local id = ARGV[2]
local row = row_of(id)
if not row then return 'unknown' end
if row.state == 'ended' then return 'ended' end
if row.state ~= 'running' then
  conclude(id, row, 'cancelled', NOTHING, '')
  call('DEL', KEYS[EXTRA])
  return 'cancelled'
end
if not row.cancelled then
  add_sum(row.worker, id, row, -1) -- the mark is part of the sum: a worker that missed the message learns it at its next beat
  row.cancelled = true
  add_sum(row.worker, id, row, 1)
  keep(id, row)
end
call('PUBLISH', PREFIX .. 'worker:' .. row.worker, id)
return 'running'
