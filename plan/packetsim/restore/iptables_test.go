package restore_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
	"nodeproxy/plan/packetsim/restore"
)

// TestRestoreErrors lists what iptables-restore or the kernel would refuse.
func TestRestoreErrors(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ name, rules, want string }{
		{"table", "*nut\nCOMMIT\n", "line 1: there is no such table"},
		{"no table", "-A INPUT -j DROP\n", "line 1: it stands outside of any table"},
		{"no commit", "*filter\n", "table filter has no COMMIT"},
		{"no commit between", "*filter\n*nat\nCOMMIT\n", "line 2: table filter has no COMMIT"},
		{"chain", table("filter", "-A KUBE-X -j DROP"), "line 2: table filter has no chain KUBE-X"},
		{"chain of another table", table("filter", "-A PREROUTING -j DROP"), "table filter has no chain PREROUTING"},
		{"jump to nowhere", table("filter", "-A INPUT -j KUBE-X"),
			"line 3: table filter has no chain KUBE-X, to which leads line 2: -A INPUT -j KUBE-X"},
		{"goto to nowhere", table("filter", "-A INPUT -g KUBE-X"), "no chain KUBE-X"},
		{"jump to a built-in chain", table("filter", "-A INPUT -j FORWARD"), "a built-in chain can't be jumped to"},
		{"loop", table("filter", "A", "B", "-A A -j B", "-A B -g A"), "leads back to itself"},
		{"loop to itself", table("filter", "A", "-A A -j A"), "leads back to itself"},
		{"long name", table("filter", "KUBE-123456789012345678901234"), "at most 28"},
		{"policy of a user's chain", table("filter", ":A DROP [0:0]"), "only built-in chains have a policy"},
		{"unknown policy", table("filter", ":INPUT REJECT [0:0]"), "REJECT is no policy"},
		{"command", table("filter", "-R INPUT -j DROP"), "command -R is not known"},
		{"quote", table("filter", `-A INPUT -m comment --comment "x -j DROP`), "a quotation does not end"},
		{"family of -d", table("filter", "-A INPUT -d ::1/128 -j DROP"), "::1/128 is not an IPv4 address"},
		{"family of DNAT", table("nat", "-A OUTPUT -p tcp -j DNAT --to-destination [::2]:80"), "::2 is not an IPv4 address"},
		{"family of REJECT", table("filter", "-A INPUT -j REJECT --reject-with icmp6-port-unreachable"),
			"is not of IPv4"},
		{"tcp-reset", table("filter", "-A INPUT -p udp -j REJECT --reject-with tcp-reset"), "needs -p tcp"},
		{"port without protocol", table("filter", "-A INPUT -m tcp --dport 80 -j DROP"), "match tcp: it needs -p"},
		{"port of another protocol", table("filter", "-A INPUT -p udp -m tcp --dport 80 -j DROP"),
			"match tcp: it needs -p"},
		{"port of not this protocol", table("filter", "-A INPUT ! -p tcp -m tcp --dport 80 -j DROP"),
			"match tcp: it needs -p"},
		{"TCP flag", table("filter", "-A INPUT -p tcp -m tcp --tcp-flags SYN,PUSH SYN -j DROP"), `no TCP flag "PUSH"`},
		{"bad port", table("filter", "-A INPUT -p tcp --dport http -j DROP"), `"http" is no port`},
		{"port beyond", table("filter", "-A INPUT -p tcp --dport 65536 -j DROP"), "is no port"},
		{"DNAT without protocol", table("nat", "-A OUTPUT -j DNAT --to-destination 10.0.0.1:80"), "a port needs -p"},
		{"DNAT to nothing", table("nat", "-A OUTPUT -j DNAT"), "it has no --to-destination"},
		{"DNAT in filter", table("filter", "-A OUTPUT -j DNAT --to-destination 10.0.0.1"), "does not belong into table filter"},
		{"DROP in nat", table("nat", "-A OUTPUT -j DROP"), "does not belong into table nat"},
		{"REJECT in nat", table("nat", "-A OUTPUT -j REJECT"), "does not belong into table nat"},
		{"state", table("filter", "-A INPUT -m conntrack --ctstate NEVER -j DROP"), `no state "NEVER"`},
		{"mark", table("filter", "-A INPUT -m mark --mark x -j DROP"), "is no mark"},
		{"probability", table("filter", "-A INPUT -m statistic --mode random --probability 1.5 -j DROP"),
			"is no probability"},
		{"bytecode", table("filter", `-A INPUT -m bpf --bytecode "1,6 0 0" -j DROP`), "is no BPF instruction"},
		{"length of bytecode", table("filter", `-A INPUT -m bpf --bytecode "2,6 0 0 0" -j DROP`), "and has 1"},
		{"unknown match", table("filter", "-A FORWARD -m socket --transparent -j DROP"),
			"line 2: option -m: the simulator does not know match socket: -A FORWARD -m socket --transparent -j DROP"},
		{"unknown option", table("filter", "-A FORWARD -p tcp -m tcp --syn -j DROP"), "does not know option --syn"},
		{"unknown target", table("filter", "-A FORWARD -j LOG --log-prefix x"), "chain LOG takes no option --log-prefix"},
		{"unknown type", table("filter", "-A FORWARD -m addrtype --dst-type BROADCAST -j DROP"), "does not know address type BROADCAST"},
		{"unknown chance", table("filter", "-A FORWARD -m statistic --mode nth --every 3 --packet 0 -j DROP"), "does not know statistic mode nth"},
		{"a word", table("filter", "-A INPUT DROP"), `"DROP" is no option`},
		{"no value", table("filter", "-A INPUT -j"), "option -j has no value"},
		{"options of a chain", table("filter", "A", "-A INPUT -j A --to-destination 10.0.0.1"),
			"chain A takes no option"},
		{"option of a target", table("filter", "-A INPUT -j DROP --hard"), "target DROP: it takes no option --hard"},
		{"inverted option of a target", table("nat", "-A OUTPUT -j DNAT ! --to-destination 10.0.0.1"), "target DNAT: it takes no option --to-destination"},
		{"set", table("filter", "-A INPUT -m set --match-set S dst -j DROP"), "there is no set S"},
		{"match without its option", table("filter", "-A INPUT -m set -j DROP"), "needs --match-set"},
		{"SET elsewhere", table("nat", "-A INPUT -j SET --map-set S dst --map-mark"), "does not belong into table nat"},
		{"SET without what", table("mangle", "-A INPUT -j SET --map-set S dst"), "it has no --map-mark"},
		{"SET of no set", table("mangle", "-A INPUT -j SET --map-set S dst --map-mark"), "there is no set S"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			if _, err := restore.Parse(plan.IPv4, tc.rules); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error is %v, want one with %q", err, tc.want)
			}
		})
	}
}

// TestRestoreInSteps holds later texts to what --noflush does with earlier ones.
func TestRestoreInSteps(t *testing.T) {
	t.Parallel()
	m := packetsim.New(plan.IPv4)
	verdict := func(step string, want packetsim.Action, lines ...string) {
		t.Helper()
		require.NoError(t, restore.IPTables(m, "# a comment\n\n"+table("filter", lines...)), "%s", step)
		outcomes, err := m.Trace(to(vip, 80), packetsim.Node{Local: local})
		require.NoError(t, err, "%s", step)
		if len(outcomes) != 1 || outcomes[0].Action != want {
			t.Fatalf("%s: outcomes are %v, want %s", step, outcomes, want)
		}
	}
	verdict("first", packetsim.Drop, "A", ":FORWARD ACCEPT [0:0]", "-A FORWARD -j A", "-A A -j DROP")
	verdict("nothing", packetsim.Drop)
	verdict("a built-in chain is not emptied", packetsim.Drop, ":FORWARD ACCEPT [0:0]")
	verdict("a declared chain is emptied", packetsim.Reject, "A", "-A A -j REJECT")
	verdict("in front", packetsim.Drop, "-I A -j DROP")
	verdict("policy", packetsim.Drop, ":FORWARD DROP [0:0]", "A")
}

func TestFamilyOfARule(t *testing.T) {
	t.Parallel()
	text := table("filter", "A", "-4 -A FORWARD -d 10.96.0.1/32 -j A", "-6 -A FORWARD -d fd00::1/128 -j A",
		"-A A -j DROP")
	for _, f := range plan.Families {
		if _, err := restore.Parse(f, text); err != nil {
			t.Error(err)
		}
	}
}
