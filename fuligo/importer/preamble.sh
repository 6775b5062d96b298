# Sourced by every bash (BASH_ENV): it tells the stand-ins which line calls them, and which of its arrays are not set.
command_not_found_handle() { @STATE@/unknown "$@"; }
_import_script_trace() {
  export IMPORT_SCRIPT_PLACE=$1:$2 IMPORT_SCRIPT_UNSET=
  local _text=$BASH_COMMAND _name
  while [[ $_text = *'[@]}'* ]]; do
    _name=${_text%%'[@]}'*}; _name=${_name##*'{'}; _text=${_text#*'[@]}'}
    [[ $_name = *[!A-Za-z0-9_]* ]] || declare -p "$_name" &>/dev/null || IMPORT_SCRIPT_UNSET+=" $_name"
  done
  echo "$IMPORT_SCRIPT_PLACE" 1<>@STATE@/place
}
set -o functrace
trap '[[ ${FUNCNAME-} = command_not_found_handle ]] || _import_script_trace "${BASH_SOURCE-}" "$LINENO"' DEBUG
