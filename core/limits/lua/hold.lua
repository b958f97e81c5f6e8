-- hold: what a hold has charged and holds, after window and money.
local HOLD = { 'state', 'plan', 'held_in', 'held_out', 'charged_in', 'charged_out', 'money', 'money_held', 'born', 'debt',
  'bin', 'pace', 'left' }

-- A hold without a plan is of the release before: it is ended, and counts in no scope of this one.
local PLANLESS = { weight = 1000, input = 0, price = { 0, 0, 0 }, scopes = {} }

-- A hold that is open, or nil and its state.
local function hold_of(key)
  local raw = call('HMGET', key, unpack(HOLD))
  if raw[1] ~= 'open' then return nil, raw[1] end
  local hold = { key = key, plan = raw[2] and cmsgpack.unpack(raw[2]) or PLANLESS }
  for i = 3, #HOLD do hold[HOLD[i]] = tonumber(raw[i] or 0) end
  return hold
end

-- Input as limits count it: what was cached counts at its weight.
local function weighed(plan, input, cached)
  return input - cached + math.ceil(cached * plan.weight / 1000)
end

-- Charge what is more than was charged before; what was held for it is held no longer. `input`: 0 until it is known.
-- What came beyond what was held, where a scope had no room for it, is debt. Returns the room for output that is left.
local function charge(hold, scopes, input, cached, output, all)
  local more_in = math.max(0, weighed(hold.plan, input, cached) - hold.charged_in)
  local more_out = math.max(0, output - hold.charged_out)
  local free_in = (input > 0 or all) and hold.held_in or 0
  local free_out = all and hold.held_out or math.min(more_out, hold.held_out)
  local room, bears = 2 ^ 53, 2 ^ 53
  for _, one in ipairs(scopes) do
    local c = one.counter -- never below 0: a counter that was lost, its holds were not, counts from there on
    c.held_in, c.held_out = math.max(0, c.held_in - free_in), math.max(0, c.held_out - free_out)
    add(c, 0, more_in, more_out)
    local its_room, its_bears = room_of(c, one.limit)
    room, bears = math.min(room, its_room), math.min(bears, its_bears)
  end
  hold.charged_in, hold.charged_out = hold.charged_in + more_in, hold.charged_out + more_out
  hold.held_in, hold.held_out = hold.held_in - free_in, hold.held_out - free_out
  local unheld = math.max(0, more_in - free_in) + math.max(0, more_out - free_out)
  hold.new_debt = math.min(unheld, math.max(0, 0 - bears))
  hold.debt = hold.debt + hold.new_debt
  return room
end

-- The scopes of a hold: keys come in pairs from `first` on, in the order in which it was reserved.
local function scopes_of(plan, first)
  local scopes = {}
  for i, one in ipairs(plan.scopes) do
    scopes[i] = { limit = one.limit, counter = load(KEYS[first + 2 * i - 2]) }
    if one.lease >= 0 then
      local a = account(KEYS[first + 2 * i - 1])
      if a and a.lease == one.lease then scopes[i].account = a end -- under another lease its usage comes late
    end
  end
  return scopes
end
