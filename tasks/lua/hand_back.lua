-- hand_back: a live worker returns what it will not finish, to the front of its line. Drain, preemption, a sick engine.
-- ARGV   2 worker  3 reason, for people  4 '1' when its engine died, perhaps of one of them
--        5.. pairs id, attempt
-- reply  how many went back (or ended, where another run would show)            cost O(pairs log n)
-- Repeat: safe, only the holder of the claim can give it back.
local returned = 0
for i = 5, #ARGV, 2 do
  local row = row_of(ARGV[i])
  if row and row.state == 'running' and row.worker == ARGV[2] and row.attempt == tonumber(ARGV[i + 1]) then
    if ARGV[4] == '1' then lose(row) end
    back(ARGV[i], row, ARGV[3])
    returned = returned + 1
  end
end
return returned
