package restore

import (
	"fmt"

	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
)

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
		words, err := Words(text)
		if err != nil {
			return fmt.Errorf("%s: %w", o, err)
		}
		r, err := parseRule(m, table, o, words)
		if err != nil {
			return fmt.Errorf("%s: %w", o, err)
		}
		c.Rules = append(c.Rules, r)
	}
	return nil
}
