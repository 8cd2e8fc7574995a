package main

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"nodeproxy/internal/nstest"
)

func TestMain(m *testing.M) {
	if filepath.Base(os.Args[0]) != "nodeproxy" { // which a test has started
		nstest.Isolate()
	}
	testscript.Main(m, map[string]func(){"nodeproxy": func() {
		if a := os.Getenv(refuseVariable); a != "" {
			if err := refuseElements(netip.MustParseAddr(a)); err != nil {
				panic(err)
			}
		}
		main()
	}})
}

// TestIsolated: neither the test program nor what it starts is in the network namespace in which "go test" was started.
func TestIsolated(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can change rules")
	}
	left := os.Getenv(nstest.LeftVariable)
	out, err := exec.Command("readlink", "/proc/self/ns/net").Output()
	if child := strings.TrimSpace(string(out)); left == "" || child == left || err != nil {
		t.Errorf("what tests start is in %s, the test program was in %q, %v", child, left, err)
	}
	threads, err := filepath.Glob("/proc/self/task/*/ns/net")
	if len(threads) == 0 || err != nil {
		t.Errorf("threads: %q, %v", threads, err)
	}
	for _, thread := range threads {
		if in, err := os.Readlink(thread); err == nil && in == left { // It may have ended.
			t.Errorf("%s is %s", thread, in)
		}
	}
}

// TestScripts runs the scenarios in testdata/script, a file for each behaviour: manifests in, rules out, as the program
// prints them. UPDATE=1 writes the golden parts anew; read them before you believe them.
func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata/script",
		UpdateScripts:       os.Getenv("UPDATE") != "",
		RequireExplicitExec: true,
		Setup:               func(e *testscript.Env) error { e.Setenv("ESC", "\x1b"); return nil },
		Cmds: map[string]func(ts *testscript.TestScript, neg bool, args []string){
			"rules":    rulesOf,
			"services": makeServices,
			"accepted": accepted,
			"exits":    exits,
		},
	})
}

// rulesOf is "rules NAMESPACE/NAME [FLAG...]": it renders the manifests in the folder m for node1 with these flags, and
// writes to the file "rules" the rules that name the Service and those of the chains that they lead to, table by table.
func rulesOf(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) == 0 {
		ts.Fatalf("usage: rules NAMESPACE/NAME [FLAG...]")
	}
	flags := append([]string{"render", "--lenient", "--manifests=m", "--node-name=node1", "--family=ipv4",
		"--service-cidr=10.96.0.0/16,fd00:10:96::/112"}, args[1:]...)
	ts.Check(ts.Exec("nodeproxy", flags...))
	lines := strings.Split(strings.TrimSpace(ts.ReadFile("stdout")), "\n")
	var out strings.Builder
	for len(lines) > 0 {
		end := 0
		for lines[end] != "COMMIT" {
			end++
		}
		if found := about(args[0], lines[1:end]); found != "" {
			fmt.Fprintf(&out, "%s\n%s", lines[0], found)
		}
		lines = lines[end+1:]
	}
	ts.Check(os.WriteFile(ts.MkAbs("rules"), []byte(out.String()), 0o644))
}

// about picks the rules of a table that name a Service, and those that these lead to.
func about(service string, lines []string) string {
	chains := map[string]bool{}
	names := func(line string) bool {
		return strings.Contains(line, `"`+service+` `) || strings.Contains(line, `"`+service+`"`) ||
			strings.Contains(line, service+":") || strings.Contains(line, " "+service+" ")
	}
	for grown := true; grown; {
		grown = false
		for _, line := range lines {
			words := strings.Fields(line)
			if words[0] != "-A" || !names(line) && !chains[words[1]] {
				continue
			}
			target := words[len(words)-1]
			own := strings.HasPrefix(target, "KUBE-S") || strings.HasPrefix(target, "KUBE-E") || strings.HasPrefix(target, "KUBE-FW")
			if own && !chains[target] && target != "KUBE-EXT-NODEPORTS" {
				chains[target], grown = true, true
			}
		}
	}
	out := ""
	for _, line := range lines {
		if words := strings.Fields(line); words[0] == "-A" && (names(line) || chains[words[1]]) {
			out += line + "\n"
		}
	}
	return out
}

// makeServices is "services FILE COUNT ENDPOINTS [FIRST]": it writes a file with that many Services, each with an EndpointSlice
// of that many endpoints.
func makeServices(ts *testscript.TestScript, _ bool, args []string) {
	var count, endpoints int
	if len(args) != 3 {
		ts.Fatalf("usage: services FILE COUNT ENDPOINTS")
	}
	_, err := fmt.Sscan(args[1]+" "+args[2], &count, &endpoints)
	ts.Check(err)
	var b strings.Builder
	for i := range count {
		fmt.Fprintf(&b, `apiVersion: v1
kind: Service
metadata: {name: s%d}
spec: {clusterIP: 10.96.%d.%d, ports: [{port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: s%d-1, labels: {kubernetes.io/service-name: s%d}}
addressType: IPv4
ports: [{name: "", port: 8080}]
endpoints:
`, i, i/200, 1+i%200, i, i)
		for e := range endpoints {
			n := i*endpoints + e
			fmt.Fprintf(&b, "- {addresses: [10.244.%d.%d]}\n", n/200, 1+n%200)
		}
		b.WriteString("---\n")
	}
	ts.Check(os.MkdirAll(filepath.Dir(ts.MkAbs(args[0])), 0o755))
	ts.Check(os.WriteFile(ts.MkAbs(args[0]), []byte(b.String()), 0o644))
}

// accepted is "accepted FILE": both iptables-restore and ip6tables-restore, of both variants, take the file.
func accepted(ts *testscript.TestScript, _ bool, args []string) {
	if nstest.UnitOnly() {
		return // iptables-restore --test needs root.
	}
	for _, tool := range []string{"iptables-nft-restore", "ip6tables-nft-restore", "iptables-legacy-restore", "ip6tables-legacy-restore"} {
		cmd := exec.Command("/usr/sbin/"+tool, "--test")
		cmd.Stdin = strings.NewReader(ts.ReadFile(args[0]))
		if out, err := cmd.CombinedOutput(); err != nil {
			ts.Fatalf("%s: %v: %s", tool, err, out)
		}
	}
}

// exits is "exits CODE PROGRAM [ARG...]": the program ends with this exit code.
func exits(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: exits CODE PROGRAM [ARG...]")
	}
	code := 0
	var failed *exec.ExitError
	switch err := ts.Exec(args[1], args[2:]...); {
	case errors.As(err, &failed):
		code = failed.ExitCode()
	case err != nil:
		ts.Fatalf("%v", err)
	}
	if strconv.Itoa(code) != args[0] {
		ts.Fatalf("%s ends with exit code %d, want %s", args[1], code, args[0])
	}
}
