-- mend: what an operator does to dead letters.
-- KEYS   + body STRING of the letter named (of none: any)
-- ARGV   2 verb  3.. its arguments
--          list FROM COUNT   newest first   -> {how many there are, {letter, …}}
--          show ID                          -> letter | {}
--          retry ID                         -> 'retried' | 'unknown' | 'gone': its body is, nothing could be run
--                                              | 'open': the same id waits or runs already
--                                              | 'shed': an operator shed its class
--          purge ID                         -> 1 | 0
-- letter: {id, reason, dead ms, attempt, losses, class, tenant, input tokens, message}
-- A retried letter waits again, with no losses. It makes no second usage entry: it was counted when it was given up.
-- Repeat: safe. Cost O(letters listed).
local verb, id = ARGV[2], ARGV[3]
local function letter_of(one)
  local packed = call('HGET', LETTERS, one)
  local letter = packed and cmsgpack.unpack(packed)
  if letter then setmetatable(letter.row, DEFAULTS) end
  return letter
end

local function told(one, letter)
  local row = letter.row
  return { one, letter.reason, letter.dead_ms, row.attempt, row.losses, row.class, row.tenant, row.input,
    letter.message }
end

if verb == 'list' then
  local from, many = tonumber(ARGV[3]), tonumber(ARGV[4])
  local found = {}
  for _, one in ipairs(call('ZREVRANGE', DEAD, from, from + many - 1)) do
    found[#found + 1] = told(one, letter_of(one))
  end
  return { call('ZCARD', DEAD), found }
end
local letter, known = letter_of(id), row_of(id)
local open = known and known.state ~= 'ended' -- the id was sent again after it was forgotten
if verb == 'show' then return letter and told(id, letter) or {} end
if verb == 'purge' then
  bury_letter(id)
  if letter and not open then call('DEL', KEYS[EXTRA]) end
  return letter and 1 or 0
end
if not letter then return 'unknown' end
if open then return 'open' end
if sheds(letter.row) then return 'shed' end
if letter.row.bodied and call('EXISTS', KEYS[EXTRA]) == 0 then return 'gone' end
bury_letter(id)
local row = letter.row
row.state, row.worker, row.gateway, row.facts, row.cancelled, row.trail, row.saver = '', '', '', '', '', '', ''
row.losses, row.first_ms, row.passed_ms, row.served, row.shown, row.held = 0, 0, 0, 0, false, false
row.due_ms = now + row.due_ms - row.entered_ms
row.deadline_ms, row.entered_ms, row.arrival, row.preferred = 0, now, call('HINCRBY', COUNTERS, 'arrival', 1), ''
call('ZREM', FORGET, id)
call('HSET', TASKS, id, letter.message)
join(id, row)
keep(id, row)
wake()
return 'retried'
