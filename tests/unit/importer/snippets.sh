# Each part is a script: its words must reach train.py as the real bash makes them (test_against_bash.py).

### quotes
x='a b'; train $x "$x" '$x' a"$x"b "\$x \"q\" \\ \n" a\ b "" ''

### empty words vanish
e=""; train $e "$e" a$e "${e}"b

### defaults
x=1; e=""; train ${x:-d} ${y:-d e} "${y:-d e}" ${e:-d} ${e-d} "${y:-"q r"}" ${x:+set} ${y:+set} end

### nested defaults
y=3; train ${x:-${y:-2}} ${x:-a${y}b} ${x:-$(echo c d)}

### assigning defaults
train ${x:=5} $x

### arrays
a=(one "two words" three); a+=(four); a[1]=2; train ${a[@]} "${a[@]}" "${a[*]}" ${#a[@]} ${a[0]} "${a[3]}" $a ${a[-1]}

### array slices
a=(a b c d e); train ${a[@]:1:2} ${a[@]:3} "${a[@]:0:1}" ${!a[@]}

### empty arrays
a=(); train "${a[@]}" ${a[@]} x "${#a[@]}"

### array without an assignment
train "${nothing[@]}" ${nothing[@]} x

### comments in arrays
a=(
       # --use-wandb
       --x 1  # behind
       #--y 2
    )
    train "${a[@]}"

### brackets stay
a=(--moe-layer-freq [0]*3+[1]*89); train ${a[@]}

### append to text
x=a; x+=b; x+="c d"; train "$x"

### cut
p=/a/b.tar.gz; train ${p%.*} ${p%%.*} ${p#*/} ${p##*/} ${p%/} "${p#/a}" ${p%.gz}

### replace
p=a-b-c; train ${p/-/_} ${p//-/_} ${p//[bc]/x} ${p/#a/z} ${p/%c/z} ${p//-}

### cases of letters
x=Model; train ${x^^} ${x,,} ${x,}

### substrings
x=abcdef; n=2; train ${x:1:2} ${x:3} ${#x} ${x:n} ${x:1:n}

### substitution
train $(echo a  b) "$(echo 'a  b')" $(seq 16 8 40) $(printf '%s-%d\n' x 5)

### substitution in backquotes
train `echo a b` "x`echo c`"

### line ends are cut
train "$(printf 'a\n\n\n')" "$(printf 'a\n b\n')"

### sums
i=3;
   train $((i*2+1)) $(( (i-5)/2 )) $((i%2)) $((2**10)) $((i>2 ? 7 : 8)) $((i==3 && i!=4)) $((-7/2)) $((-7%3)) $(($i+1)) $((1<<4))

### counting
i=1; ((i++)); ((i+=5)); j=$((i--)); let_=$((++i)); train $i $j $let_

### for
for x in a "b c" $(seq 2); do a+=("<$x>"); done; train "${a[@]}"

### for with numbers
for ((i=0; i<3; i++)); do a+=($i); done; train ${a[@]}

### layer pattern
N=5; K=2; f=(); for ((i=0; i<N; i++)); do if (( i < K )); then f+=(0); else f+=(1); fi; done
       printf -v P "[%s]" "$(IFS=', '; echo "${f[*]}")"; train "$P"

### while
i=0; while [ $i -lt 3 ]; do i=$((i+1)); [[ $i == 2 ]] && continue; a+=($i); done; train ${a[@]}

### until and break
i=0; until false; do i=$((i+1)); if [ $i -ge 4 ]; then break; fi; done; train $i

### break two loops
for i in 1 2; do for j in 1 2; do [ $j = 2 ] && break 2; a+=($i$j); done; done; train ${a[@]}

### read lines
while IFS= read -r line; do a+=("$line"); done <<< $'one two\n  three'; train "${a[@]}"

### read words
while read -r ip slots; do a+=("$ip:$slots"); done <<EOF
10.0.0.1 slot=8
10.0.0.2   slot=4 x
EOF
train "${a[@]}"

### tests
x=abc; e=;
   train $([[ $x == a* ]] && echo 1) $([[ $x == "a*" ]] || echo 2) $([ -z "$e" ] && echo 3) $([ -n "$x" -a 1 -eq 1 ] && echo 4)

### tests with words
x=5; if test $x -gt 3; then a=big; else a=small; fi; [[ ! $x < 6 || $x != 7 ]] && b=yes; train $a $b

### elif
x=2; if [ $x = 1 ]; then a=one; elif [ $x = 2 ]; then a=two; else a=many; fi; train $a

### case
for x in main dev-1 other ''; do case "$x" in main|master) a+=(m);; dev-*) a+=(d);; "") a+=(e);; *) a+=(o);; esac;
   done; train ${a[@]}

### functions
f() { local x=$1; shift; echo "$x:$#:$*"; return 3; }; x=keep; r=$(f a b c); train "$r" $x;

### functions and status
f() { return 3; }; f; train $?;

### shift
set -- a b c; shift; train "$@" $# $1

### all arguments
f() { train "$@" $#; }; f "a b" c

### slices of all arguments
f() { train "${@:2}" x ${@:1:1} "${@:2:1}"; }; f a "b c" d

### arrays as alternatives
M=(--a "1 2"); train ${M[@]+"${M[@]}"} ${M[@]+${M[@]}} ${N[@]+"${N[@]}"} "${M[@]:-none}" "${N[@]:-none}" ${M+x} end

### lists
false && a=1 || a=2; true || a=3; ! false && b=4; train $a $b

### pipes
train $(printf 'a 1\nb 2\nc 3\n' | awk '{print $2}') $(echo 1,2,3 | tr ',' '\n' | wc -l) $(printf 'x\ny\n' | grep -c y)

### text tools
t=$'NV18 NV18\nPIX\nNV12';
   train $(echo "$t" | grep -o 'NV[0-9][0-9]*' | wc -l) \
  $(echo a-b-c | cut -d- -f2) $(echo "$t" | head -n 1) $(echo "$t" | tail -1)

### subshells forget
x=1; (x=2; cd /); y=$(x=3; echo $x); train $x $y

### paths
train $(dirname /a/b/c.sh) $(basename /a/b/c.sh .sh) $(dirname x) $(cd /usr/.. && pwd) $(basename /a/b/)

### here-document
x=5
cat > "$T" <<EOF
a: $x
  b: "\$x" ${x}0 $x $x
$(echo c)
EOF
train "$(cat $T)"

### sums in a here-document
n=3; cat > $T <<EOF
a: $((256 - 64)) $((n*2)) "$((n / 2))" $(echo "$((1+n))")
EOF
train "$(cat $T)"

### here-document as it is
x=5; cat <<'EOF' > $T
$x "y"
  z
EOF
train "$(cat $T)"

### here-document with tabs
cat > $T <<-EOF
		a
	b
	EOF
train "$(cat $T)"

### appending files
echo a > $T; echo b >> $T; { echo c; echo d; } >> $T; train $(cat $T)

### json in quotes
V=1
       J="{
  \"env_vars\": {
    \"A\": \"${V}\",   \"B\": \"$V $V\"
  }
}"
       train "$J"

### ansi quotes
train $'a\tb' $'it\'s'

### ranges
train {1..4} {3..1}

### IFS
IFS=,; x=a,b,,c; train $x;

### exit in a substitution
x=$(echo a; exit 3; echo b); train $x

### errexit
set -e; if false; then :; fi; false || true; x=$(echo ok); train $x

### mapfile
mapfile -t a <<< $'x y\nz'; train "${a[@]}" ${#a[@]}

### prefix assignment
x=1; IFS=: read -r a b <<< "p:q"; train $a $b $x

### unset
x=1; unset x; train ${x:-gone}

### a line goes on at the end
train a b \

### line continuation
a=(--x \
       1); train ${a[@]} \
       --y 2
