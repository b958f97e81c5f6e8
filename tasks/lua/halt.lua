-- halt: what operators have stopped of this model, as Postgres says it. Paused: nothing is accepted, and nothing is
-- claimed. A class that is shed: the same of that class, and what waits of it ends, but for background work. What runs
-- goes on.
-- ARGV   2 the mark of the stops as it was read, before Postgres was  3 a mark that no other change has
--        4 'p' when the model is paused, else ''  5 the classes that are shed, one digit each
-- reply  {1 so it is | 0 somebody changed it meanwhile: read both again, whether something shed is left to end}
-- Repeat: safe, and goes on with what is left to end.                          cost O(256 log n)
local was = stopped()
local same = (was.paused and 'p' or '') == ARGV[4] and was.shed == ARGV[5]
if was.mark ~= ARGV[2] and not same then return { 0, 0 } end
if not same then
  call('HSET', COUNTERS, 'stops', ARGV[3] .. '|' .. ARGV[4] .. '|' .. ARGV[5])
  for class in string.gmatch(ARGV[5], '%d') do
    if not is_shed(class) then call('HSET', COUNTERS, 'sweep' .. class, '[' .. class .. '|') end
  end
  for class in string.gmatch(was.shed, '%d') do
    if not string.find(ARGV[5], class, 1, true) then call('HDEL', COUNTERS, 'sweep' .. class) end
  end
  stops = { mark = ARGV[3], paused = ARGV[4] == 'p', shed = ARGV[5] }
  if call('ZCARD', WAITING) > 0 then wake() end -- some of it may go on
end
return { 1, sweep(256) and 1 or 0 }
