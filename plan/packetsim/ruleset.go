// Package packetsim reads iptables rules as text and simulates a packet: its possible outcomes, and the rules that lead to each.
//
// It reads the input of iptables-restore and the output of iptables-save, and likewise for ipset, ipvsadm and ip. It follows a
// connection's first packet through the hooks as the kernel does: table nat, routing, IPVS, table filter, masquerading. Where a
// rule chooses at random, both outcomes are followed, and where IPVS has several real servers, each of them; so the result is every
// possible outcome with its exact probability. An unknown match or target is an error as soon as a packet meets it, never a guess.
//
// IPVS behaves as with the sysctl net.ipv4.vs.conntrack set to 1; otherwise nothing that it sends could be masqueraded. Not
// simulated are replies, persistence beyond a client's first connection, and limits of real servers.
package packetsim

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"nodeproxy/plan"
)

// Ruleset is what one family's packets meet after one or more texts were restored: tables, sets, virtual servers, and addresses for
// them.
type Ruleset struct {
	family    plan.Family
	tables    map[string]map[string]*chain
	sets      map[string]*set
	servers   map[serverKey]*server
	addresses map[netip.Prefix]bool
	// diverted are ports that are local by a mark, divertMark, that routing rules lead to a table by.
	diverted    map[plan.Address]bool
	divertMark  uint32
	markTables  map[uint32]string
	tableRoutes map[tableRoute]bool
}

// chain is a chain of rules. Built-in chains have a policy.
type chain struct {
	table, name string
	policy      string // ACCEPT or DROP; empty for a chain of the user's
	rules       []*rule
}

// rule is one rule, read but for what is not known.
type rule struct {
	line    int    // in its text, from 1
	text    string // as it was written, from "-A CHAIN" on
	spec    string // its words behind the chain, for -D
	matches []matcher
	target  target
}

func (r *rule) String() string { return fmt.Sprintf("line %d: %s", r.line, r.text) }

// builtin are the chains that the kernel calls, by table.
var builtin = map[string][]string{
	"raw":      {"PREROUTING", "OUTPUT"},
	"mangle":   {"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"},
	"nat":      {"PREROUTING", "INPUT", "OUTPUT", "POSTROUTING"},
	"filter":   {"INPUT", "FORWARD", "OUTPUT"},
	"security": {"INPUT", "FORWARD", "OUTPUT"},
}

// New returns the rules of a machine that has none: built-in chains only, each with policy ACCEPT.
func New(f plan.Family) *Ruleset {
	rs := &Ruleset{family: f, tables: map[string]map[string]*chain{}, sets: map[string]*set{},
		servers: map[serverKey]*server{}, addresses: map[netip.Prefix]bool{},
		diverted: map[plan.Address]bool{}, markTables: map[uint32]string{}, tableRoutes: map[tableRoute]bool{}}
	for table, names := range builtin {
		rs.tables[table] = map[string]*chain{}
		for _, name := range names {
			rs.tables[table][name] = &chain{table: table, name: name, policy: "ACCEPT"}
		}
	}
	return rs
}

// Parse reads rules of a family into an empty machine.
func Parse(f plan.Family, text string) (*Ruleset, error) {
	rs := New(f)
	if err := rs.Restore(text); err != nil {
		return nil, err
	}
	return rs, nil
}

// Restore adds a text as "iptables-restore --noflush" does: a chain that the text declares is emptied first, unless it is built in,
// and everything that the text does not name stays. The error names the line. It stands for an error of iptables-restore or of the
// kernel; lines before it, even of the same table, may have been added.
func (rs *Ruleset) Restore(text string) error {
	t := transaction{rs: rs}
	for i, line := range strings.Split(text, "\n") {
		if err := t.line(i+1, strings.TrimSpace(line)); err != nil {
			return fmt.Errorf("%s rules, line %d: %w: %.300s", rs.family, i+1, err, line)
		}
	}
	if t.table != "" {
		return fmt.Errorf("%s rules: table %s has no COMMIT", rs.family, t.table)
	}
	return nil
}

// Unknown returns the rules with a match or target that the simulator does not know. A packet that meets one of them can't be
// traced.
func (rs *Ruleset) Unknown() error {
	var errs []error
	for _, table := range slices.Sorted(maps.Keys(rs.tables)) {
		for _, name := range slices.Sorted(maps.Keys(rs.tables[table])) {
			for _, r := range rs.tables[table][name].rules {
				if err := r.unknown(); err != nil {
					errs = append(errs, fmt.Errorf("table %s, %s: %w", table, r, err))
				}
			}
		}
	}
	return errors.Join(errs...)
}

func (r *rule) unknown() error {
	for _, m := range r.matches {
		if u, ok := m.(unknownMatch); ok {
			return u.error()
		}
	}
	if u, ok := r.target.(unknownTarget); ok {
		return u.error()
	}
	return nil
}

// transaction is the part of a text that was read, up to a COMMIT.
type transaction struct {
	rs    *Ruleset
	table string // empty outside of any
}

func (t *transaction) line(number int, line string) error {
	switch {
	case line == "" || line[0] == '#':
		return nil
	case line[0] == '*':
		name := strings.TrimSpace(line[1:])
		if t.table != "" {
			return fmt.Errorf("table %s has no COMMIT before the next begins", t.table)
		}
		if builtin[name] == nil {
			return errors.New("there is no such table")
		}
		t.table = name
		return nil
	case t.table == "":
		return errors.New("it stands outside of any table")
	case line == "COMMIT":
		err := t.rs.verify(t.table)
		t.table = ""
		return err
	case line[0] == ':':
		return t.declare(line[1:])
	}
	return t.command(number, line)
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
	chains := t.rs.tables[t.table]
	c := chains[name]
	switch {
	case c != nil && c.policy != "":
		switch policy {
		case "ACCEPT", "DROP":
			c.policy = policy
		case "-":
		default:
			return fmt.Errorf("%s is no policy", policy)
		}
	case policy != "-":
		return errors.New("only built-in chains have a policy")
	case c != nil:
		c.rules = nil
	default:
		chains[name] = &chain{table: t.table, name: name}
	}
	return nil
}

// command reads a line as iptables itself takes it, perhaps behind counters.
func (t *transaction) command(number int, line string) error {
	words, err := split(line)
	if err != nil {
		return err
	}
	if strings.HasPrefix(words[0], "[") {
		words = words[1:]
	}
	if len(words) > 0 && (words[0] == "-4" || words[0] == "-6") {
		if (words[0] == "-4") != (t.rs.family == plan.IPv4) {
			return nil // It is for the other family, and passed over by iptables-restore too.
		}
		words = words[1:]
	}
	if len(words) < 2 {
		return errors.New("a command needs a chain")
	}
	chains, name := t.rs.tables[t.table], words[1]
	c := chains[name]
	if words[0] == "-N" || words[0] == "--new-chain" {
		if c != nil {
			return errors.New("the chain exists")
		}
		chains[name] = &chain{table: t.table, name: name}
		return nil
	}
	if c == nil {
		return fmt.Errorf("table %s has no chain %s", t.table, name)
	}
	switch words[0] {
	case "-F", "--flush":
		c.rules = nil
	case "-X", "--delete-chain":
		return t.deleteChain(c)
	case "-P", "--policy":
		if c.policy == "" || len(words) != 3 || words[2] != "ACCEPT" && words[2] != "DROP" {
			return errors.New("it sets no policy of a built-in chain")
		}
		c.policy = words[2]
	case "-A", "--append":
		return t.appendRule(c, number, line, words[2:])
	case "-I", "--insert":
		return t.insertRule(c, number, line, words[2:])
	case "-D", "--delete":
		return deleteRule(c, words[2:])
	default:
		return fmt.Errorf("command %s is not known", words[0])
	}
	return nil
}

func (t *transaction) deleteChain(c *chain) error {
	switch {
	case c.policy != "":
		return errors.New("a built-in chain can't be deleted")
	case len(c.rules) > 0:
		return errors.New("the chain still has rules")
	}
	for _, other := range t.rs.tables[t.table] {
		for _, r := range other.rules {
			if j, ok := r.target.(jump); ok && j.chain == c.name {
				return fmt.Errorf("the chain is still in use by %s", r)
			}
		}
	}
	delete(t.rs.tables[t.table], c.name)
	return nil
}

// appendRule, insertRule and deleteRule take a line's words behind the chain. For the latter two, a position may come
// first.
func (t *transaction) appendRule(c *chain, number int, line string, words []string) error {
	return t.insertAt(c, len(c.rules), number, line, words)
}

func (t *transaction) insertRule(c *chain, number int, line string, words []string) error {
	at, words := position(words)
	return t.insertAt(c, max(at, 1)-1, number, line, words)
}

func (t *transaction) insertAt(c *chain, at, number int, line string, words []string) error {
	if at > len(c.rules) {
		return fmt.Errorf("chain %s has only %d rules", c.name, len(c.rules))
	}
	r, err := t.rs.parseRule(t.table, words)
	if err != nil {
		return err
	}
	r.line, r.text, r.spec = number, line, specOf(words)
	c.rules = slices.Insert(c.rules, at, r)
	return nil
}

func deleteRule(c *chain, words []string) error {
	at, words := position(words)
	if at == 0 {
		at = 1 + slices.IndexFunc(c.rules, func(r *rule) bool { return r.spec == specOf(words) })
	}
	if at < 1 || at > len(c.rules) {
		return errors.New("there is no such rule to delete")
	}
	c.rules = slices.Delete(c.rules, at-1, at)
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

func specOf(words []string) string { return strings.Join(words, "\x00") }

// verify checks what the kernel checks when a table is committed: that jumps lead to chains, and nowhere in circles.
func (rs *Ruleset) verify(table string) error {
	const visiting, done = 1, 2
	chains := rs.tables[table]
	state := map[*chain]int{}
	var visit func(c *chain) error
	visit = func(c *chain) error {
		state[c] = visiting
		for _, r := range c.rules {
			j, ok := r.target.(jump)
			if !ok {
				continue
			}
			next := chains[j.chain]
			switch {
			case next == nil:
				return fmt.Errorf("table %s has no chain %s, to which leads %s", table, j.chain, r)
			case next.policy != "":
				return fmt.Errorf("a built-in chain can't be jumped to: %s", r)
			case state[next] == visiting:
				return fmt.Errorf("chain %s leads back to itself by %s", j.chain, r)
			case state[next] == done:
				continue
			}
			if err := visit(next); err != nil {
				return err
			}
		}
		state[c] = done
		return nil
	}
	for _, name := range slices.Sorted(maps.Keys(chains)) {
		if state[chains[name]] == 0 {
			if err := visit(chains[name]); err != nil {
				return err
			}
		}
	}
	return nil
}

// split divides a line into words as iptables-restore does: at white space, except within double quotes, in which a
// backslash takes the next character as it is.
func split(line string) ([]string, error) {
	var words []string
	var word strings.Builder
	inWord, quoted, escaped := false, false, false
	for i := range len(line) {
		c := line[i]
		switch {
		case escaped:
			word.WriteByte(c)
			escaped = false
		case quoted && c == '\\':
			escaped = true
		case c == '"':
			quoted, inWord = !quoted, true
		case !quoted && (c == ' ' || c == '\t'):
			if inWord {
				words = append(words, word.String())
				word.Reset()
				inWord = false
			}
		default:
			word.WriteByte(c)
			inWord = true
		}
	}
	if quoted {
		return nil, errors.New("a quotation does not end")
	}
	if inWord {
		words = append(words, word.String())
	}
	return words, nil
}
