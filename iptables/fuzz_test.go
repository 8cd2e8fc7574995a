package iptables_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os/exec"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"nodeproxy/internal/nstest"
	"nodeproxy/iptables"
	"nodeproxy/plan"
	"nodeproxy/proxier"
	"nodeproxy/source/sourcetest"
)

// Every line that a render may consist of. No text of an object gets anywhere but between the quotes of a comment, and
// there only as a name; and from a built-in chain, rules lead to ours and nowhere else.
var (
	ownChain = `KUBE-[A-Za-z0-9:./-]{1,23}`
	matches  = strings.Join([]string{
		` (! )?-s [0-9a-f.:]+/[0-9]+`, ` (! )?-d [0-9a-f.:]+/[0-9]+`, ` (! )?-i [a-z0-9]+[+]?`, ` -p (tcp|udp|sctp)`,
		` -m comment --comment ([a-zA-Z0-9_-]+|"[a-zA-Z0-9 .:/>_\[\];-]*")`,
		` -m (tcp|udp|sctp)( --dport [0-9]+(:[0-9]+)?)?`,
		` -m conntrack (! )?--ctstate [A-Z,]+`,
		` -m mark (! )?--mark 0x[0-9a-f]+/0x[0-9a-f]+`,
		` -m addrtype --(src|dst)-type LOCAL`,
		` -m statistic --mode random --probability 0[.][0-9]{11}`,
		` -m recent (--set|--rcheck --seconds [0-9]+ --reap) --name KUBE-SEP-[A-Z2-7]{16} --mask [0-9a-f.:]+ --rsource`,
		` -m bpf --bytecode "[0-9, ]+"`,
	}, "|")
	targets = strings.Join([]string{
		`-[jg] ` + ownChain, `-j ACCEPT`, `-j DROP`, `-j RETURN`, `-j REJECT --reject-with (icmp6?-port-unreachable|tcp-reset)`,
		`-j MASQUERADE( --random-fully)?`, `-j MARK --set-xmark 0x[0-9a-f]+/0x[0-9a-f]+`,
		`-j DNAT --to-destination [0-9a-f.:\[\]]+`,
	}, "|")
	line = regexp.MustCompile(`^([*](filter|nat)|COMMIT|:` + ownChain + ` - \[0:0\]` +
		`|-A ` + ownChain + `(` + matches + `)* (` + targets + `)` +
		`|-A (PREROUTING|INPUT|FORWARD|OUTPUT|POSTROUTING)(` + matches + `)* -j ` + ownChain + `)$`)
)

// render draws objects and settings, and returns the rules of each family, having looked at every line.
func render(t *rapid.T, word *rapid.Generator[string]) (v4, v6 string) {
	settings := plan.Settings{LocalhostNodePorts: rapid.Bool().Draw(t, "localhost"), MasqueradeAll: rapid.Bool().Draw(t, "masquerade all")}
	settings.NodePortAddresses.Primary = rapid.Bool().Draw(t, "primary")
	settings.DetectLocal = rapid.SampledFrom([]plan.DetectLocal{{}, {Mode: plan.DetectNodeCIDR},
		{Mode: plan.DetectBridgeInterface, Interface: "cni0"}, {Mode: plan.DetectInterfaceNamePrefix, Interface: "veth"},
	}).Draw(t, "detect local")
	state := proxier.NewState("node", settings, plan.Families[:], nil)
	state.Apply(sourcetest.Objects(t, word))
	p, _ := state.Update()
	o := iptables.Options{MasqueradeBit: rapid.IntRange(0, 31).Draw(t, "bit"), RandomFully: true,
		CompactAbove: rapid.IntRange(0, 3).Draw(t, "compact above")}
	v4, v6 = iptables.Render(p, plan.IPv4, o), iptables.Render(p, plan.IPv6, o)
	for _, l := range strings.Split(v4+strings.TrimSuffix(v6, "\n"), "\n") {
		if !line.MatchString(l) {
			t.Fatalf("not a line of ours: %q", l)
		}
	}
	return v4, v6
}

// restoreTest asks the programs of a variant whether they accept the rules. Nothing is changed.
func restoreTest(variant, v4, v6 string) error {
	for program, text := range map[string]string{"iptables": v4, "ip6tables": v6} {
		cmd := exec.Command("/usr/sbin/"+program+"-"+variant+"-restore", "--test")
		cmd.Stdin = strings.NewReader(text)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s\n%s", cmd.Path, err, bytes.TrimSpace(out), text)
		}
	}
	return nil
}

// FuzzRulesAccepted: whatever an API server or a manifest says, what is rendered of it is only what rules consist of, and
// iptables-restore accepts it.
func FuzzRulesAccepted(f *testing.F) {
	nstest.NeedKernel(f)
	seeds := rand.New(rand.NewPCG(1, 2))
	for range 8 {
		seed := make([]byte, 8<<10)
		for i := range seed {
			seed[i] = byte(seeds.Uint32())
		}
		f.Add(seed)
	}
	word := rapid.OneOf(rapid.SampledFrom(sourcetest.Words), rapid.String())
	f.Fuzz(rapid.MakeFuzz(func(t *rapid.T) {
		v4, v6 := render(t, word)
		require.NoError(t, restoreTest("nft", v4, v6))
	}))
}

// TestRulesAccepted is the same on random objects, in every run of the tests. The rules of all draws are tried at once, and
// draw by draw if that fails.
func TestRulesAccepted(t *testing.T) {
	t.Parallel()
	var draws [][2]string
	proxied := 0
	rapid.Check(t, func(t *rapid.T) {
		v4, v6 := render(t, rapid.SampledFrom(sourcetest.Words))
		draws = append(draws, [2]string{v4, v6})
		if strings.Contains(v4+v6, "DNAT --to") {
			proxied++
		}
	})
	counted := len(draws)
	if more := 500 - counted; more > 0 { // Of so many, a third have by chance less than once in 10^7 runs; nearly half have on average.
		each := more/counted + 1 // With the seed of the first tier, a second Check begins with the draws of the first.
		rapid.Check(t, func(t *rapid.T) {
			for range each {
				v4, v6 := render(t, rapid.SampledFrom(sourcetest.Words))
				counted++
				if strings.Contains(v4+v6, "DNAT --to") {
					proxied++
				}
			}
		})
	}
	if proxied < counted/3 {
		t.Errorf("only %d of %d draws have rules that send anything anywhere", proxied, counted)
	}
	var all4, all6 strings.Builder
	for _, d := range draws {
		all4.WriteString(d[0])
		all6.WriteString(d[1])
	}
	nstest.NeedKernel(t)
	for _, variant := range []string{"nft", "legacy"} {
		if restoreTest(variant, all4.String(), all6.String()) == nil {
			continue
		}
		found := false
		for _, d := range draws {
			if err := restoreTest(variant, d[0], d[1]); err != nil {
				t.Error(err)
				found = true
				break
			}
		}
		if !found {
			t.Errorf("%s: all draws are accepted one by one, but not in one text", variant)
		}
	}
}

// TestTextIsData: even a name that should never have got into a plan stays within its comment. There are as many rules as
// with a plain name, in as many chains, and they are accepted.
func TestTextIsData(t *testing.T) {
	t.Parallel()
	// The names of chains are made of those of Services, by a hash.
	hashed := regexp.MustCompile(`KUBE-(SVC|SVL|EXT|FW|SEP)-[A-Z2-7]{16}`)
	comment := regexp.MustCompile(`--comment ("(\\.|[^"\\])*"|\S+)`)
	rulesFor := func(key plan.Key) (text, form string) {
		key.Protocol, key.Family = plan.TCP, plan.IPv4
		p := plan.New(plan.Node{}, plan.Settings{})
		p.Set(&plan.ServicePort{
			Key: key, ExternalPolicy: plan.Local, Affinity: 10 * time.Second,
			Frontends: []plan.Frontend{
				{Kind: plan.ClusterIP, Addr: netip.MustParseAddr("10.96.0.1"), Protocol: plan.TCP, Port: 80},
				{Kind: plan.LoadBalancerIP, Addr: netip.MustParseAddr("192.0.2.1"), Protocol: plan.TCP, Port: 80},
				{Kind: plan.NodePort, Protocol: plan.TCP, Port: 30080},
			},
			SourceRanges: []netip.Prefix{netip.MustParsePrefix("203.0.113.0/24")},
			Endpoints: plan.Endpoints{Any: true, Cluster: []plan.Endpoint{{Addr: netip.MustParseAddrPort("10.244.0.1:80")}},
				Local: []plan.Endpoint{{Addr: netip.MustParseAddrPort("10.244.0.1:80")}}},
		})
		text = iptables.Render(p, plan.IPv4, iptables.Options{MasqueradeBit: 14})
		return text, comment.ReplaceAllString(hashed.ReplaceAllString(text, "KUBE-$1-X"), "--comment X")
	}
	var all strings.Builder
	_, plain := rulesFor(plan.Key{Service: plan.Service{Namespace: "ns", Name: "web"}, Port: "http"})
	for _, word := range append([]string{"it's", `\" -j ACCEPT`, "\x7f", "-A", strings.Repeat("ü", 5000)}, sourcetest.Words...) {
		for field, key := range map[string]plan.Key{
			"namespace": {Service: plan.Service{Namespace: word, Name: "web"}, Port: "http"},
			"name":      {Service: plan.Service{Namespace: "ns", Name: word}, Port: "http"},
			"port":      {Service: plan.Service{Namespace: "ns", Name: "web"}, Port: word},
		} {
			text, form := rulesFor(key)
			if form != plain || strings.ContainsAny(text, "\r\x00\x7f") {
				t.Errorf("%s %.80q makes\n%s\na plain one\n%s", field, word, form, plain)
			}
			all.WriteString(text)
		}
	}
	nstest.NeedKernel(t)
	for _, variant := range []string{"nft", "legacy"} { // An error shows the line.
		assert.NoError(t, restoreTest(variant, all.String(), "*nat\nCOMMIT\n"))
	}
}
