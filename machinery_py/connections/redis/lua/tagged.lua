-- In front of each script in a cluster: the hash tag of the application is put before every key, and
-- every channel, that the script names. So the script is as on one Redis, and all its keys are in one slot.

local redis = (function(server)
  local many = {DEL = 1, EXISTS = 1, MGET = 1}
  local function tagged(run)
    return function(command, key, ...)
      if not key then return run(command) end
      if not many[command] then return run(command, '$TAG' .. key, ...) end
      local keys = {key, ...}
      for i, one in ipairs(keys) do keys[i] = '$TAG' .. one end
      return run(command, unpack(keys))
    end
  end
  return {call = tagged(server.call), pcall = tagged(server.pcall), sha1hex = server.sha1hex}
end)(redis)
