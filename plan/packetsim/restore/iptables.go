package restore

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
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

// priority returns the priority of a table's built-in chain, as netfilter has it.
func priority(table string, h packetsim.Hook) int {
	if table == "nat" && (h == packetsim.Input || h == packetsim.PostRouting) {
		return 100
	}
	return map[string]int{"raw": -300, "mangle": -150, "nat": -100, "filter": 0, "security": 50}[table]
}

// policies are those of built-in chains, and whether they drop.
var policies = map[string]bool{"ACCEPT": false, "DROP": true}

// IPTables adds a text as "iptables-restore --noflush" does: a chain that the text declares is emptied first, unless it is built in,
// and everything that the text does not name stays. The error names the line. It stands for an error of iptables-restore or of the
// kernel; lines before it, even of the same table, may have been added.
func IPTables(m *packetsim.Machine, text string) error {
	t := transaction{m: m}
	if err := eachLine(m, "rules", text, t.line); err != nil {
		return err
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
		return t.begin(strings.TrimSpace(o.text[1:]))
	case t.table == "":
		return errors.New("it stands outside of any table")
	case o.text == "COMMIT":
		t.table = ""
		return verify(t.chains)
	case o.text[0] == ':':
		return t.declare(o.text[1:])
	}
	return t.command(o)
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
			t.m.Attach(table, &packetsim.Chain{Name: string(h)}, h, priority(table, h), table == "nat")
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
	if len(name) > 28 {
		return errors.New("a chain's name has at most 28 characters")
	}
	c := t.chains[name]
	switch {
	case c != nil && c.Base && policy == "-":
	case c != nil && c.Base:
		return setPolicy(c, policy)
	case policy != "-":
		return errors.New("only built-in chains have a policy")
	case c != nil:
		c.Rules = nil
	default:
		t.chains[name] = &packetsim.Chain{Name: name}
	}
	return nil
}

func setPolicy(c *packetsim.Chain, policy string) error {
	drop, known := policies[policy]
	if !known {
		return fmt.Errorf("%s is no policy", policy)
	}
	c.Drop = drop
	return nil
}

// command reads a line as iptables itself takes it, perhaps behind counters.
func (t *transaction) command(o origin) error {
	words, err := Words(o.text)
	if err != nil {
		return err
	}
	if strings.HasPrefix(words[0], "[") {
		words = words[1:]
	}
	if len(words) > 0 && (words[0] == "-4" || words[0] == "-6") {
		if (words[0] == "-4") != (t.m.Family == plan.IPv4) {
			return nil // It is for the other family, and passed over by iptables-restore too.
		}
		words = words[1:]
	}
	if len(words) < 2 {
		return errors.New("a command needs a chain")
	}
	command, name, words := words[0], words[1], words[2:]
	c := t.chains[name]
	if command == "-N" || command == "--new-chain" {
		if c != nil {
			return errors.New("the chain exists")
		}
		t.chains[name] = &packetsim.Chain{Name: name}
		return nil
	}
	if c == nil {
		return fmt.Errorf("table %s has no chain %s", t.table, name)
	}
	switch command {
	case "-F", "--flush":
		c.Rules = nil
	case "-X", "--delete-chain":
		return t.deleteChain(c)
	case "-P", "--policy":
		if !c.Base || len(words) != 1 {
			return errors.New("it sets no policy of a built-in chain")
		}
		return setPolicy(c, words[0])
	case "-A", "--append":
		return t.insert(c, len(c.Rules), o, words)
	case "-I", "--insert":
		at, words := position(words)
		return t.insert(c, max(at, 1)-1, o, words)
	case "-D", "--delete":
		return deleteRule(c, words)
	default:
		return fmt.Errorf("command %s is not known", command)
	}
	return nil
}

func (t *transaction) deleteChain(c *packetsim.Chain) error {
	switch {
	case c.Base:
		return errors.New("a built-in chain can't be deleted")
	case len(c.Rules) > 0:
		return errors.New("the chain still has rules")
	}
	for _, other := range t.chains {
		for r := range rules(other) {
			if r.jump == c.Name {
				return fmt.Errorf("the chain is still in use by %s", r)
			}
		}
	}
	delete(t.chains, c.Name)
	return nil
}

// insert adds the rule of a line, whose words behind the chain are given.
func (t *transaction) insert(c *packetsim.Chain, at int, o origin, words []string) error {
	if at > len(c.Rules) {
		return fmt.Errorf("chain %s has only %d rules", c.Name, len(c.Rules))
	}
	r, err := parseRule(t.m, t.table, o, words)
	if err != nil {
		return err
	}
	c.Rules = slices.Insert(c.Rules, at, packetsim.Rule(r))
	return nil
}

// deleteRule deletes a rule by its position or its words.
func deleteRule(c *packetsim.Chain, words []string) error {
	at, words := position(words)
	if at == 0 {
		at = 1 + slices.IndexFunc(c.Rules, func(r packetsim.Rule) bool { return slices.Equal(r.(*rule).words, words) })
	}
	if at < 1 || at > len(c.Rules) {
		return errors.New("there is no such rule to delete")
	}
	c.Rules = slices.Delete(c.Rules, at-1, at)
	return nil
}

// position takes a rule's number off the words; 0 where there is none.
func position(words []string) (int, []string) {
	if len(words) > 0 {
		if n, err := strconv.Atoi(words[0]); err == nil && n > 0 {
			return n, words[1:]
		}
	}
	return 0, words
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
