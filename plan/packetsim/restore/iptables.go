// Package restore reads rules of iptables. IPTables adds a text for iptables-restore to a packetsim.Machine, and refuses what that program or
// the kernel would refuse, and whatever this program's own rules do not consist of. Options and what parses their values read any rule.
package restore

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
)

// builtin are the chains that the kernel calls, by table. Their names are those of the hooks.
var builtin = map[string][]packetsim.Hook{
	"raw":      {packetsim.PreRouting, packetsim.Output},
	"mangle":   {packetsim.PreRouting, packetsim.Input, packetsim.Forward, packetsim.Output, packetsim.PostRouting},
	"nat":      {packetsim.PreRouting, packetsim.Input, packetsim.Output, packetsim.PostRouting},
	"filter":   {packetsim.Input, packetsim.Forward, packetsim.Output},
	"security": {packetsim.Input, packetsim.Forward, packetsim.Output},
}

// Priority returns the priority of the chain of a table that a hook calls, as netfilter has it.
func Priority(table string, h packetsim.Hook) int {
	if table == "nat" && (h == packetsim.Input || h == packetsim.PostRouting) {
		return 100
	}
	return map[string]int{"raw": -300, "mangle": -150, "nat": -100, "filter": 0, "security": 50}[table]
}

// origin is where a rule was found, and how it was written.
type origin struct {
	line int // from 1; 0 for none
	text string
}

func (o origin) String() string {
	if o.line == 0 {
		return o.text
	}
	return fmt.Sprintf("line %d: %s", o.line, o.text)
}

// Text is how it was written.
func (o origin) Text() string { return o.text }

// Parse returns a machine that has nothing but the rules of a text for iptables-restore.
func Parse(f plan.Family, text string) (*packetsim.Machine, error) {
	m := packetsim.New(f)
	return m, IPTables(m, text)
}

// IPTables adds a text as "iptables-restore --noflush" does: a chain that the text declares is emptied first, unless it is built in,
// and everything that the text does not name stays. Of its commands, -A and -I are known. The error names the line. It stands for an error of
// iptables-restore or of the kernel; lines before it, even of the same table, may have been added.
func IPTables(m *packetsim.Machine, text string) error {
	t := transaction{m: m}
	for i, line := range strings.Split(text, "\n") {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		if err := t.line(origin{i + 1, line}); err != nil {
			return fmt.Errorf("%s rules, line %d: %w: %.300s", m.Family, i+1, err, line)
		}
	}
	if t.table != "" {
		return fmt.Errorf("%s rules: table %s has no COMMIT", m.Family, t.table)
	}
	return nil
}

// transaction is the part of a text that was read, up to a COMMIT.
type transaction struct {
	m      *packetsim.Machine
	table  string // empty outside of any
	chains map[string]*packetsim.Chain
}

func (t *transaction) line(o origin) error {
	switch {
	case o.text[0] == '*':
		return t.begin(o.text[1:])
	case t.table == "":
		return errors.New("it stands outside of any table")
	case o.text == "COMMIT":
		t.table = ""
		return verify(t.chains)
	case o.text[0] == ':':
		return t.declare(o.text[1:])
	}
	command, rest, _ := strings.Cut(o.text, " ")
	if command == "-4" || command == "-6" {
		if (command == "-4") != (t.m.Family == plan.IPv4) {
			return nil // It is for the other family, and passed over by iptables-restore too.
		}
		command, rest, _ = strings.Cut(rest, " ")
	}
	name, text, _ := strings.Cut(rest, " ")
	c := t.chains[name]
	if c == nil {
		return fmt.Errorf("table %s has no chain %s", t.table, name)
	}
	r, err := parseRule(t.m, t.table, o, text)
	switch {
	case err != nil:
		return err
	case command == "-A":
		c.Rules = append(c.Rules, r)
	case command == "-I":
		c.Rules = slices.Insert(c.Rules, 0, packetsim.Rule(r))
	default:
		return fmt.Errorf("command %s is not known", command)
	}
	return nil
}

// begin begins a table, which gets its built-in chains if it is new.
func (t *transaction) begin(table string) error {
	if t.table != "" {
		return fmt.Errorf("table %s has no COMMIT before the next begins", t.table)
	}
	if builtin[table] == nil {
		return errors.New("there is no such table")
	}
	if t.m.Tables[table] == nil {
		for _, h := range builtin[table] {
			t.m.Attach(table, &packetsim.Chain{Name: string(h)}, h, Priority(table, h), table == "nat")
		}
	}
	t.table, t.chains = table, t.m.Tables[table]
	return nil
}

// declare reads ":CHAIN POLICY [packets:bytes]".
func (t *transaction) declare(line string) error {
	words := strings.Fields(line)
	if len(words) < 2 {
		return errors.New("a chain needs a policy, or - for none")
	}
	name, policy := words[0], words[1]
	switch c := t.chains[name]; {
	case len(name) > 28:
		return errors.New("a chain's name has at most 28 characters")
	case policy != "-" && (c == nil || !c.Base):
		return errors.New("only built-in chains have a policy")
	case policy != "-" && policy != "ACCEPT" && policy != "DROP":
		return fmt.Errorf("%s is no policy", policy)
	case policy != "-":
		c.Drop = policy == "DROP"
	case c == nil:
		t.chains[name] = &packetsim.Chain{Name: name}
	case !c.Base:
		c.Rules = nil
	}
	return nil
}

// verify checks what the kernel checks when a table is committed: that jumps lead to chains, and nowhere in circles.
func verify(chains map[string]*packetsim.Chain) error {
	const visiting, done = 1, 2
	state := map[*packetsim.Chain]int{}
	var visit func(c *packetsim.Chain) error
	visit = func(c *packetsim.Chain) error {
		if state[c] == done {
			return nil
		}
		state[c] = visiting
		for r := range rules(c) {
			if r.jump == "" {
				continue
			}
			next := chains[r.jump]
			switch {
			case next == nil:
				return fmt.Errorf("table %s has no chain %s, to which leads %s", r.table, r.jump, r)
			case next.Base:
				return fmt.Errorf("a built-in chain can't be jumped to: %s", r)
			case state[next] == visiting:
				return fmt.Errorf("chain %s leads back to itself by %s", r.jump, r)
			}
			if err := visit(next); err != nil {
				return err
			}
		}
		state[c] = done
		return nil
	}
	for _, name := range slices.Sorted(maps.Keys(chains)) {
		if err := visit(chains[name]); err != nil {
			return err
		}
	}
	return nil
}

// Lazy returns a machine with tables of iptables of which a chain is read when a packet gets there. chain returns the rules of a chain,
// as iptables-save prints them behind "-A CHAIN"; false if there is no such chain. Whether all chains exist is not checked before.
func Lazy(f plan.Family, tables []string, chain func(table, name string) ([]string, bool)) (*packetsim.Machine, error) {
	m := packetsim.New(f)
	m.Load = func(table, name string) (*packetsim.Chain, error) {
		rules, exists := chain(table, name)
		if !exists {
			return nil, nil
		}
		c := &packetsim.Chain{Name: name}
		return c, appendRules(m, table, c, rules)
	}
	for _, table := range tables {
		t := transaction{m: m}
		if err := t.begin(table); err != nil {
			return nil, err
		}
		for _, h := range builtin[table] {
			rules, _ := chain(table, string(h))
			if err := appendRules(m, table, t.chains[string(h)], rules); err != nil {
				return nil, err
			}
		}
	}
	return m, nil
}

func appendRules(m *packetsim.Machine, table string, c *packetsim.Chain, rules []string) error {
	for _, text := range rules {
		o := origin{text: "-A " + c.Name + " " + text}
		r, err := parseRule(m, table, o, text)
		if err != nil {
			return fmt.Errorf("%s: %w", o, err)
		}
		c.Rules = append(c.Rules, r)
	}
	return nil
}
