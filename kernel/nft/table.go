package nft

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"nodeproxy/plan"
)

// Rule is one rule: its statements, and what it looks like in the language of nft.
type Rule struct {
	Text  string
	Exprs []expr.Any
	// Comment is for people, who see it in the output of nft.
	Comment string
}

// Chain is a chain at a hook, which ends with acceptance.
type Chain struct {
	Name, Hook string
	Priority   int32
	Rules      []Rule
	// Reroutes is set where the kernel finds another route for packets whose mark the chain has changed.
	Reroutes bool
}

func (c Chain) kind() nftables.ChainType {
	if c.Reroutes {
		return nftables.ChainTypeRoute
	}
	return nftables.ChainTypeFilter
}

var hooks = map[string]*nftables.ChainHook{
	"prerouting": nftables.ChainHookPrerouting, "input": nftables.ChainHookInput, "forward": nftables.ChainHookForward,
	"output": nftables.ChainHookOutput,
}

// Text is a table in the language of nft.
func Text(f plan.Family, name string, chains []Chain) string {
	out := fmt.Sprintf("table %s %s\n", FamilyName(f), name)
	for _, c := range chains {
		out += fmt.Sprintf("chain %s type %s hook %s priority %d\n", c.Name, c.kind(), c.Hook, c.Priority)
		for _, r := range c.Rules {
			out += "rule " + c.Name + " " + r.Text + "\n"
		}
	}
	return out
}

// Table is a table that belongs to this program alone, in the network namespace of the thread that opened it.
type Table struct {
	// Conn and Table are for sets, which this package knows nothing of.
	Conn  *nftables.Conn
	Table *nftables.Table
}

// Open returns ErrAbsent where the kernel has no nftables. It makes no table.
func Open(f plan.Family, name string) (*Table, error) {
	conn, err := nftables.New(nftables.AsLasting())
	if err != nil {
		return nil, fmt.Errorf("nftables: netlink socket: %w", err)
	}
	t := &Table{conn, &nftables.Table{Family: tableFamily(f), Name: name}}
	if _, err := conn.ListTablesOfFamily(t.Table.Family); err != nil {
		_ = t.Close()
		if err = absent(err); errors.Is(err, ErrAbsent) {
			return nil, err
		}
		return nil, fmt.Errorf("nftables: %w", err)
	}
	return t, nil
}

// Close closes the socket. The table stays.
func (t *Table) Close() error { return t.Conn.CloseLasting() }

// Failed returns err. If it is one, it gives the table another socket: answers to what has failed may still come, as after ENOBUFS, and
// each later request on the same socket would take them for its own. What was prepared and not flushed is gone with the socket.
func (t *Table) Failed(err error) error {
	if err == nil {
		return nil
	}
	if conn, dialErr := nftables.New(nftables.AsLasting()); dialErr == nil {
		_ = t.Conn.CloseLasting()
		t.Conn = conn
	}
	return err
}

// label identifies a rule: each carries its label in the kernel.
func (c Chain) label(i int) []byte {
	sum := sha256.Sum256([]byte(fmt.Sprintf("%s %s %d %s", c.Name, c.Hook, c.Priority, c.Rules[i].Text)))
	return fmt.Appendf(nil, "nodeproxy %x", sum[:8])
}

func (c Chain) labels() [][]byte {
	var out [][]byte
	for i := range c.Rules {
		out = append(out, c.label(i))
	}
	return out
}

// Holds reports whether the table has chains, and whether they are these.
func (t *Table) Holds(want []Chain) (exists, same bool, err error) {
	have, err := t.labels()
	if err != nil {
		return false, false, fmt.Errorf("reading nftables table %s: %w", t.Table.Name, t.Failed(err))
	}
	same = len(have) == len(want)
	for _, c := range want {
		same = same && have[c.Name] != nil && slices.EqualFunc(have[c.Name], c.labels(), slices.Equal[[]byte])
	}
	return len(have) > 0, same, nil
}

// labels are those of the rules that there are, by chain.
func (t *Table) labels() (map[string][][]byte, error) {
	all, err := t.Conn.ListChainsOfTableFamily(t.Table.Family)
	if err != nil {
		return nil, err
	}
	out := map[string][][]byte{}
	for _, c := range all {
		if c.Table.Name != t.Table.Name {
			continue
		}
		rules, err := t.Conn.GetRules(t.Table, c)
		if err != nil {
			return nil, err
		}
		out[c.Name] = [][]byte{}
		for _, r := range rules {
			out[c.Name] = append(out[c.Name], r.UserData)
		}
	}
	return out, nil
}

// Replace has the next flush put an empty table in place of the table.
func (t *Table) Replace() {
	t.Conn.AddTable(t.Table)
	t.Conn.DelTable(t.Table)
	t.Conn.AddTable(t.Table)
}

// Add has the next flush add chains.
func (t *Table) Add(chains []Chain) {
	accept := nftables.ChainPolicyAccept
	for _, c := range chains {
		chain := t.Conn.AddChain(&nftables.Chain{
			Name: c.Name, Table: t.Table, Type: c.kind(), Hooknum: hooks[c.Hook],
			Priority: nftables.ChainPriorityRef(nftables.ChainPriority(c.Priority)), Policy: &accept,
		})
		for i, r := range c.Rules {
			t.Conn.AddRule(&nftables.Rule{Table: t.Table, Chain: chain, Exprs: r.Exprs, UserData: c.label(i)})
		}
	}
}

// Flush does what has been prepared, all or nothing of it.
func (t *Table) Flush() error {
	if err := t.Conn.Flush(); err != nil {
		return fmt.Errorf("writing nftables table %s: %w", t.Table.Name, t.Failed(err))
	}
	return nil
}

// FamiliesWith lists the families that have a table of a name in the network namespace of the calling thread.
func FamiliesWith(name string) ([]plan.Family, error) {
	var out []plan.Family
	for _, f := range plan.Families {
		names, err := Tables(f)
		if err != nil && !errors.Is(err, ErrAbsent) {
			return nil, fmt.Errorf("listing nftables tables: %w", err)
		}
		if slices.Contains(names, name) {
			out = append(out, f)
		}
	}
	return out, nil
}

// RemoveTables removes the tables of a name, if there are any.
func RemoveTables(name string) error {
	families, err := FamiliesWith(name)
	errs := []error{err}
	for _, f := range families {
		if err := DeleteTable(f, name); err != nil && !errors.Is(err, unix.ENOENT) {
			errs = append(errs, fmt.Errorf("removing nftables table %s %s: %w", FamilyName(f), name, err))
		}
	}
	return errors.Join(errs...)
}
