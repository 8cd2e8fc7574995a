// Package xtables brings tables of iptables to what a mode desires, by the programs of iptables, and reports when other programs
// change them. It decides nothing: what is desired, and in which order it is written, is the business of its callers.
//
// Diff compares what is desired with what a table holds, and returns Changes. A full sync, the rules of mode ipvs, cleanup, and
// the search for drift all begin with it. A Writer makes Changes.
package xtables
