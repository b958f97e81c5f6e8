-- holding: an entry of the index of prefixes, `worker|until;worker|until`, newest first. Key table: core/prefix.py.
local HOLDERS, HOLDERS_DUE = KEYS[1], KEYS[2]
local now = now_ms()

local function holders_in(entry, but) -- those that hold it still, as {'worker|until', …} and {'worker', …}
  local entries, names = {}, {}
  for worker, due in string.gmatch(entry or '', '([^|;]+)|(%d+)') do
    if tonumber(due) > now and worker ~= but then
      entries[#entries + 1] = worker .. '|' .. due
      names[#names + 1] = worker
    end
  end
  return entries, names
end
