-- hand_back: a live worker returns what it will not finish, to the front of its line.
-- ARGV   2 worker  3.. pairs id, attempt
-- reply  how many went back (or ended, where a second run would show)            cost O(pairs log n)
-- Repeat: safe, only the holder of the claim can give it back.
local returned = 0
for i = 3, #ARGV, 2 do
  local row = row_of(ARGV[i])
  if row and row.state == 'running' and row.worker == ARGV[2] and row.attempt == tonumber(ARGV[i + 1]) then
    back(ARGV[i], row, 'its worker was shut down')
    returned = returned + 1
  end
end
return returned
